#pragma once

#include "ops/registry.h"

/// The functions that fill builtin_registry().
namespace heddle::ops {

// The kernels of one platform: all of them, or, in a build without its back end, none.
void register_cuda(Registry& registry);    ///< cuda/, or stub/cuda.cpp
void register_ascend(Registry& registry);  ///< npu/, for the simulated device too

// The kernels of one operator that every build has: those of the CPU, and the reference.
void register_gated_delta_net(Registry& registry);  ///< gated_delta_rule, gdn_gates, gated_rms_norm
void register_causal_conv1d(Registry& registry);
void register_embedding(Registry& registry);
void register_rms_norm(Registry& registry);
void register_linear(Registry& registry);
void register_grouped_low_rank(Registry& registry);
void register_rotary(Registry& registry);
void register_attention(Registry& registry);  ///< attention, output_gate
void register_swiglu(Registry& registry);
void register_moe(Registry& registry);
void register_frozen_experts(Registry& registry);
void register_linear_cross_entropy(Registry& registry);
void register_optimizer_step(Registry& registry);
void register_decode_step(Registry& registry);
void register_sampling(Registry& registry);  ///< sample_tokens

}  // namespace heddle::ops
