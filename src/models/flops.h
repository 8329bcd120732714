#pragma once

#include "models/config.h"

namespace heddle::models {

/// Weights of the matrix products that one token passes through: projections, active experts, head.
std::int64_t matmul_weights_per_token(const Config& config);

/// Floating-point operations of forward and backward for one token in a sequence of
/// `sequence_length`, the formula of every MFU in Heddle: 6 per weight of the products, causal
/// attention 6 x heads x head_dim x length per layer, gated delta rule 12 x Hv x K x V per layer.
/// `trained_share` 1 for full training; 2/3 when weight gradients are not computed (LoRA).
/// Recomputation is not counted.
double training_flops_per_token(const Config& config, double sequence_length,
                                double trained_share = 1);

}  // namespace heddle::models
