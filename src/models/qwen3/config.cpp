#include <algorithm>

#include "base/errors.h"
#include "base/json.h"
#include "models/config_reader.h"
#include "models/qwen3/family.h"

namespace heddle::models::qwen3 {
namespace {

/// Attention over a window of tokens is not built: refuses where the file uses it.
void require_no_window(ConfigReader& text) {
  text.require("use_sliding_window", false);
  const Json& json = text.json();
  if (!json.contains("layer_types") || !json["layer_types"].is_array()) return;
  const Json& types = json["layer_types"];
  for (std::size_t i = 0; i < types.size(); ++i) {
    if (types[i] != "full_attention") {
      throw_error<ModelError>("{}: layer_types[{}] is {}: expected \"full_attention\"",
                              text.source(), i, json::shown(types[i]));
    }
  }
}

/// The defaults here and below are those of the configuration class of transformers for this model
/// type.
nn::AttentionDims attention_dims(ConfigReader& text, const Config& config, bool is_moe) {
  nn::AttentionDims dims{};
  dims.hidden_size = config.hidden_size;
  dims.num_attention_heads = text.positive("num_attention_heads", 32);
  // null: as many as query heads.
  const bool is_null = text.json().contains("num_key_value_heads");
  dims.num_key_value_heads =
      text.positive("num_key_value_heads", is_null && !is_moe ? dims.num_attention_heads
                                           : is_moe           ? 4
                                                              : 32);
  dims.head_dim = text.positive(
      "head_dim",
      is_moe ? std::max<std::int64_t>(1, config.hidden_size / dims.num_attention_heads) : 128);
  dims.rms_norm_eps = config.rms_norm_eps;
  dims.norm_offset = config.norm_offset;
  return dims;
}

nn::MoeDims moe_dims(ConfigReader& text, const Config& config) {
  nn::MoeDims dims{};
  dims.hidden_size = config.hidden_size;
  // transformers 5 writes num_local_experts, published files have num_experts.
  const char* key = text.has("num_local_experts") ? "num_local_experts" : "num_experts";
  dims.num_experts = text.positive(key, 128);
  dims.num_experts_per_tok = text.positive("num_experts_per_tok", 8);
  dims.moe_intermediate_size = text.positive("moe_intermediate_size", 768);
  dims.normalize_top_k = text.boolean("norm_topk_prob", false);
  return dims;
}

}  // namespace

Config parse(const Json& json, const std::string& source) {
  Config config;
  config.model_type = json["model_type"].get<std::string>();
  const bool is_moe = config.model_type == "qwen3_moe";
  ConfigReader text(json, source, config.defaulted);
  config.vocab_size = text.positive("vocab_size", 151936);
  config.hidden_size = text.positive("hidden_size", is_moe ? 2048 : 4096);
  read_common(text, json, config);
  require_no_window(text);
  config.rope_theta = text.rope_number("rope_theta", 10000);
  config.tie_word_embeddings = text.boolean("tie_word_embeddings", false);
  const std::int64_t count = text.positive("num_hidden_layers", is_moe ? 24 : 32);
  const nn::AttentionDims attention = attention_dims(text, config, is_moe);
  config.rotary_dim = attention.head_dim;
  std::vector<bool> sparse(static_cast<std::size_t>(count), false);
  std::optional<nn::MoeDims> moe;
  if (is_moe) {
    moe = moe_dims(text, config);
    sparse = read_sparse_layers(text, count);
    config.output_router_logits = text.boolean("output_router_logits", false);
    config.router_aux_loss_coef = text.number("router_aux_loss_coef", 0.001);
  }
  const bool has_dense = std::find(sparse.begin(), sparse.end(), false) != sparse.end();
  const std::int64_t width =
      has_dense ? text.positive("intermediate_size", is_moe ? 6144 : 22016) : 0;
  for (const bool is_sparse : sparse) {
    LayerShape layer;
    layer.hidden_size = config.hidden_size;
    layer.attention = attention;
    if (is_sparse) layer.moe = moe;
    if (!is_sparse) layer.intermediate_size = width;
    config.layers.push_back(layer);
  }
  config.weights = weight_names(config);
  check_dims(config, source);
  return config;
}

Family family() {
  return {"Qwen3, Qwen3-MoE",
          {"qwen3", "qwen3_moe"},
          parse,
          presets,
          {{"qwen3", {"qwen3"}}, {"qwen3_moe", {"qwen3moe"}}}};
}

}  // namespace heddle::models::qwen3
