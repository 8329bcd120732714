#include "ops/builtin.h"
#include "ops/npu/kernels.h"

namespace heddle::ops {

void register_ascend(Registry& registry) {
  npu::add_gated_delta_rule(registry);
  npu::add_causal_conv1d(registry);
  npu::add_rms_norm(registry);
  npu::add_qk_norm_rope(registry);
  npu::add_attention(registry);
  npu::add_swiglu(registry);
  npu::add_moe(registry);
  npu::add_linear_cross_entropy(registry);
  npu::add_adamw(registry);
}

}  // namespace heddle::ops
