#pragma once

#include "ops/registry.h"

/// The kernels of CUDA devices, each defined in its operator's folder.
namespace heddle::ops::cuda {

void add_adamw(Registry& registry);
void add_attention(Registry& registry);
void add_attention_decode(Registry& registry);
void add_causal_conv1d(Registry& registry);
void add_conv_decode(Registry& registry);
void add_decode_step(Registry& registry);
void add_embedding(Registry& registry);
void add_fp8_linear(Registry& registry);
void add_frozen_experts(Registry& registry);
void add_grouped_low_rank(Registry& registry);
void add_gated_delta_net(Registry& registry);  ///< gdn_gates, gated_rms_norm
void add_gated_delta_rule(Registry& registry);
void add_gated_delta_rule_decode(Registry& registry);
void add_linear(Registry& registry);
void add_linear_cross_entropy(Registry& registry);
void add_moe_experts(Registry& registry);
void add_moe_route(Registry& registry);
void add_output_gate(Registry& registry);
void add_qk_norm_rope(Registry& registry);
void add_rms_norm(Registry& registry);
void add_sample_tokens(Registry& registry);
void add_swiglu(Registry& registry);

}  // namespace heddle::ops::cuda
