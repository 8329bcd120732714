#include "models/flops.h"

namespace heddle::models {

std::int64_t matmul_weights_per_token(const Config& config) {
  std::int64_t weights = config.hidden_size * config.vocab_size;
  for (const LayerShape& layer : config.layers) weights += layer.matmul_weights();
  return weights;
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
