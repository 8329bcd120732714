#pragma once

#include <cstdint>
#include <vector>

#include <ATen/core/Tensor.h>

namespace heddle::train {

/// [L,E] int64: how often each expert was chosen in each of the L layers that have experts.
/// `experts` are the choices [T,k] by layer, undefined where there are none; tokens from
/// `real_tokens` on count nowhere. Undefined if no layer has experts.
at::Tensor expert_load(const std::vector<at::Tensor>& experts, std::int64_t num_experts,
                       std::int64_t real_tokens);

/// The load of a layer's busiest expert over the mean load: 1 is balance, E / k the worst.
struct LoadBalance {
  double largest, mean;  ///< Over the layers.
};

/// Of a load [L,E], each layer with a token at least.
LoadBalance load_max_over_mean(const at::Tensor& load);

}  // namespace heddle::train
