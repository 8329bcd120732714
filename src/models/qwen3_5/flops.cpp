#include "models/qwen3_5/flops.h"

namespace heddle::models::qwen3_5 {

std::int64_t layer_matmul_weights(const Config& config, std::int64_t layer) {
  const std::int64_t H = config.hidden_size;
  std::int64_t weights = 0;
  if (config.full_attention[layer]) {
    const std::int64_t q = config.num_attention_heads * config.head_dim;
    const std::int64_t kv = config.num_key_value_heads * config.head_dim;
    weights += H * (2 * q + 2 * kv) + q * H;
  } else {
    const std::int64_t k = config.linear_num_key_heads * config.linear_key_head_dim;
    const std::int64_t v = config.linear_num_value_heads * config.linear_value_head_dim;
    weights += H * (2 * k + 2 * v + 2 * config.linear_num_value_heads) + v * H;
  }
  if (config.sparse_mlp[layer]) {
    weights += H * config.num_experts +
               3 * H * config.moe_intermediate_size * config.num_experts_per_tok +
               3 * H * config.shared_expert_intermediate_size + H;
  } else {
    weights += 3 * H * config.intermediate_size;
  }
  return weights;
}

std::int64_t matmul_weights_per_token(const Config& config) {
  std::int64_t weights = config.hidden_size * config.vocab_size;
  for (std::int64_t i = 0; i < config.num_hidden_layers; ++i)
    weights += layer_matmul_weights(config, i);
  return weights;
}

double training_flops_per_token(const Config& config, double sequence_length,
                                double trained_share) {
  double flops = 6.0 * static_cast<double>(matmul_weights_per_token(config));
  for (std::int64_t i = 0; i < config.num_hidden_layers; ++i) {
    flops +=
        config.full_attention[i]
            ? 6.0 * static_cast<double>(config.num_attention_heads * config.head_dim) *
                  sequence_length
            : 12.0 * static_cast<double>(config.linear_num_value_heads *
                                         config.linear_key_head_dim * config.linear_value_head_dim);
  }
  return flops * trained_share;
}

}  // namespace heddle::models::qwen3_5
