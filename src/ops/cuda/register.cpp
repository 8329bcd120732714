#include "ops/builtin.h"
#include "ops/cuda/kernels.h"

namespace heddle::ops {

void register_cuda(Registry& registry) {
  cuda::add_gated_delta_rule(registry);
  cuda::add_gated_delta_rule_decode(registry);
  cuda::add_gated_delta_net(registry);
  cuda::add_causal_conv1d(registry);
  cuda::add_conv_decode(registry);
  cuda::add_embedding(registry);
  cuda::add_rms_norm(registry);
  cuda::add_linear(registry);
  cuda::add_grouped_low_rank(registry);
  cuda::add_qk_norm_rope(registry);
  cuda::add_attention(registry);
  cuda::add_attention_decode(registry);
  cuda::add_output_gate(registry);
  cuda::add_swiglu(registry);
  cuda::add_moe_route(registry);
  cuda::add_moe_experts(registry);
  cuda::add_frozen_experts(registry);
  cuda::add_linear_cross_entropy(registry);
  cuda::add_adamw(registry);
  cuda::add_decode_step(registry);
  cuda::add_sample_tokens(registry);
}

}  // namespace heddle::ops
