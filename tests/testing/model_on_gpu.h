#pragma once

#include <cstdint>
#include <utility>

#include <nlohmann/json.hpp>

#include "assembly/model_on_ranks.h"
#include "models/registry.h"

namespace heddle::testing {

inline constexpr std::int64_t kVocabularyOnGpu = 512;

/// A small model of random weights in bf16 on the first GPU. Its heads have the sizes of the
/// published models, which the kernels want.
inline assembly::ModelOnRanks model_on_gpu(assembly::Purpose purpose,
                                           assembly::AdapterSource adapters = {},
                                           bool has_experts = false) {
  const nlohmann::ordered_json json = {
      {"model_type", has_experts ? "qwen3_5_moe_text" : "qwen3_5_text"},
      {"vocab_size", kVocabularyOnGpu},
      {"hidden_size", 256},
      {"intermediate_size", 640},
      {"num_hidden_layers", 4},
      {"num_attention_heads", 4},
      {"num_key_value_heads", 2},
      {"head_dim", 256},
      {"linear_num_key_heads", 2},
      {"linear_num_value_heads", 4},
      {"linear_key_head_dim", 128},
      {"linear_value_head_dim", 128},
      {"num_experts", 16},
      {"num_experts_per_tok", 4},
      {"moe_intermediate_size", 128},
      {"shared_expert_intermediate_size", 128},
      {"initializer_range", 0.05},
      {"tie_word_embeddings", true}};
  runtime::Context context;
  context.device = c10::Device(c10::DeviceType::CUDA, 0);
  context.dtype = at::kBFloat16;
  context.seed = 5;
  assembly::ModelRecipe recipe;
  recipe.config = models::parse_config(json, "test");
  recipe.purpose = purpose;
  recipe.weights = assembly::Weights::kRandom;
  recipe.adapters = std::move(adapters);
  return assembly::place(recipe, context);
}

}  // namespace heddle::testing
