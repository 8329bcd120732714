#pragma once

#include <memory>
#include <string>
#include <vector>

#include <nlohmann/json.hpp>

#include "data/batch.h"
#include "models/model.h"
#include "models/registry.h"
#include "testing/device.h"

namespace heddle::testing {

/// Four layers of every kind.
inline models::Config tiny_config(bool moe = false, std::string type = {}) {
  if (type.empty()) type = moe ? "qwen3_5_moe_text" : "qwen3_5_text";
  nlohmann::ordered_json json = {{"model_type", type},
                                 {"vocab_size", 97},
                                 {"hidden_size", 32},
                                 {"intermediate_size", 48},
                                 {"num_hidden_layers", 4},
                                 {"num_attention_heads", 4},
                                 {"num_key_value_heads", 2},
                                 {"head_dim", 16},
                                 {"linear_num_key_heads", 2},
                                 {"linear_num_value_heads", 4},
                                 {"linear_key_head_dim", 16},
                                 {"linear_value_head_dim", 16},
                                 {"num_experts", 4},
                                 {"num_experts_per_tok", 2},
                                 {"moe_intermediate_size", 16},
                                 {"shared_expert_intermediate_size", 24},
                                 {"initializer_range", 0.2},
                                 {"tie_word_embeddings", false}};
  return models::parse_config(json, "test");
}

/// Gives a random model gates that remember and norms that are not neutral.
inline void make_lively(models::Model& model) {
  model.visit_parameters([](nn::Parameter& parameter) {
    if (parameter.name().ends_with("A_log")) parameter.data().fill_(-1.5);
    if (parameter.name().ends_with("dt_bias")) parameter.data().fill_(-0.5);
    if (parameter.name().ends_with("layernorm.weight")) parameter.data().fill_(0.25);
  });
}

inline constexpr std::uint64_t kTinySeed = 11;

/// A tiny_config() model alone, with random weights that make_lively() has changed.
inline std::unique_ptr<models::Model> tiny_model(c10::ScalarType dtype, bool moe = false,
                                                 c10::Device device = testing::device(),
                                                 const ops::KernelPolicy& policy = {}) {
  runtime::Context context;
  context.device = device;
  context.dtype = dtype;
  models::ModelOptions options;
  options.auxiliary_loss = moe;
  options.duties.generates = true;
  options.duties.several_adapters = true;
  options.kernel_policy = policy;
  auto model = std::make_unique<models::Model>(tiny_config(moe), "model.", context, options);
  model->allocate();
  model->initialize(kTinySeed);
  make_lively(*model);
  return model;
}

/// Sequences of the given lengths with tokens that depend on the sequence alone, every position
/// labelled but `prompt` at the start of the first.
inline data::Batch batch_of(const std::vector<std::pair<int, int>>& seed_and_length,
                            int prompt = 0) {
  static thread_local std::vector<std::vector<std::int32_t>> tokens, labels;
  static thread_local std::vector<std::vector<float>> weights;
  tokens.clear(), labels.clear(), weights.clear();
  for (const auto& [seed, length] : seed_and_length) {
    std::vector<std::int32_t> row;
    for (int t = 0; t < length; ++t) row.push_back((seed * 31 + t * t * 7 + t * 3) % 97);
    std::vector<std::int32_t> label(row.begin() + 1, row.end());
    label.push_back(-100);
    std::vector<float> weight(row.size(), 1.0F);
    weight.back() = 0;
    for (int t = 0; tokens.empty() && t < prompt; ++t) label[t] = -100, weight[t] = 0;
    tokens.push_back(row), labels.push_back(label), weights.push_back(weight);
  }
  std::vector<data::SequenceView> views;
  for (std::size_t i = 0; i < tokens.size(); ++i) {
    views.push_back({tokens[i], labels[i], weights[i], static_cast<std::int64_t>(i), 0});
  }
  return data::Batch::from_sequences(views);
}

}  // namespace heddle::testing
