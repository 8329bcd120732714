#pragma once

#include <nlohmann/json.hpp>

namespace heddle::testing {

/// config.json of the smallest model with both kinds of layers, for the tokenizer of examples/.
inline nlohmann::ordered_json small_config() {
  return {{"model_type", "qwen3_5_text"},
          {"vocab_size", 4096},
          {"hidden_size", 32},
          {"intermediate_size", 64},
          {"num_hidden_layers", 4},
          {"num_attention_heads", 2},
          {"num_key_value_heads", 1},
          {"head_dim", 16},
          {"linear_num_key_heads", 2},
          {"linear_num_value_heads", 2},
          {"linear_key_head_dim", 16},
          {"linear_value_head_dim", 16},
          {"tie_word_embeddings", true}};
}

}  // namespace heddle::testing
