#pragma once

#include <cstdint>
#include <vector>

#include <ATen/core/Tensor.h>

namespace heddle::train {

/// [L,E] int64: how often each expert was chosen in each of the L layers of the model that have
/// experts, by `sparse`. `experts` are the choices [T,k] of the layers from `first_layer` on, 0 in
/// the rows of other layers; tokens from `real_tokens` on count nowhere. Undefined if no layer has
/// experts.
at::Tensor expert_load(const std::vector<at::Tensor>& experts, std::int64_t first_layer,
                       const std::vector<bool>& sparse, std::int64_t num_experts,
                       std::int64_t real_tokens, c10::Device device);

/// The load of a layer's busiest expert over the mean load: 1 is balance, E / k the worst.
struct LoadBalance {
  double largest, mean;  ///< Over the layers.
};

/// Balance of a load [L,E], each layer with a token at least.
LoadBalance load_max_over_mean(const at::Tensor& load);

}  // namespace heddle::train
