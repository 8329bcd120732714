#pragma once

#include "ops/registry.h"

/// The kernels of Ascend NPUs, each defined in its operator's folder. They call operators of
/// torch_npu by their schema, so that every build holds them and the simulated device runs them.
namespace heddle::ops::npu {

void add_adamw(Registry& registry);
void add_attention(Registry& registry);
void add_causal_conv1d(Registry& registry);
void add_gated_delta_rule(Registry& registry);
void add_linear_cross_entropy(Registry& registry);
void add_moe(Registry& registry);
void add_qk_norm_rope(Registry& registry);
void add_rms_norm(Registry& registry);
void add_swiglu(Registry& registry);

}  // namespace heddle::ops::npu
