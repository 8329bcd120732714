#include "models/flops.h"

#include <numeric>
#include <vector>

#include "models/unit.h"

namespace heddle::models {

std::int64_t matmul_weights_per_token(const Config& config) {
  const std::vector<std::int64_t> costs = unit_costs(config);
  return std::accumulate(costs.begin(), costs.end(), std::int64_t{0});
}

double training_flops_per_token(const Config& config, double sequence_length,
                                double trained_share) {
  double flops = 6.0 * static_cast<double>(matmul_weights_per_token(config));
  for (const LayerShape& layer : config.layers) {
    if (const auto& attention = layer.attention) {
      flops += 6.0 * static_cast<double>(attention->num_attention_heads * attention->head_dim) *
               sequence_length;
    } else {
      const nn::GatedDeltaNetDims& dims = *layer.gated_delta_net;
      flops += 12.0 * static_cast<double>(dims.value_dim() * dims.key_head_dim);
    }
  }
  return flops * trained_share;
}

}  // namespace heddle::models
