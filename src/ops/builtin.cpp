#include "ops/builtin.h"

namespace heddle::ops {

const Registry& builtin_registry() {
  static const Registry registry = [] {
    Registry made;
    register_cuda(made);
    register_ascend(made);
    register_gated_delta_net(made);
    register_causal_conv1d(made);
    register_embedding(made);
    register_rms_norm(made);
    register_linear(made);
    register_grouped_low_rank(made);
    register_rotary(made);
    register_attention(made);
    register_swiglu(made);
    register_moe(made);
    register_frozen_experts(made);
    register_linear_cross_entropy(made);
    register_optimizer_step(made);
    register_decode_step(made);
    register_sampling(made);
    return made;
  }();
  return registry;
}

}  // namespace heddle::ops
