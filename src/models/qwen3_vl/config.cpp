#include "models/config_reader.h"
#include "models/qwen3_vl/family.h"

namespace heddle::models::qwen3_vl {
namespace {

constexpr const char* kNested = "qwen3_vl";

/// The defaults here and below are those of Qwen3VLTextConfig of transformers.
nn::AttentionDims attention_dims(ConfigReader& text, const Config& config) {
  nn::AttentionDims dims{};
  dims.hidden_size = config.hidden_size;
  dims.num_attention_heads = text.positive("num_attention_heads", 32);
  // null: as many as query heads.
  const bool is_null = text.json().contains("num_key_value_heads");
  dims.num_key_value_heads =
      text.positive("num_key_value_heads", is_null ? dims.num_attention_heads : 32);
  dims.head_dim = text.positive("head_dim", 128);
  dims.rms_norm_eps = config.rms_norm_eps;
  dims.norm_offset = config.norm_offset;
  return dims;
}

}  // namespace

Config parse(const Json& json, const std::string& source) {
  Config config;
  config.model_type = json["model_type"].get<std::string>();
  config.nested = config.model_type == kNested;
  ConfigReader text(text_of(json, config, source), source, config.defaulted);
  config.vocab_size = text.positive("vocab_size", 151936);
  config.hidden_size = text.positive("hidden_size", 4096);
  read_common(text, json, config);
  config.rope_theta = text.rope_number("rope_theta", 500000);
  read_mrope_section(text, {24, 20, 20}, config);
  // The value at the top level decides where there is one.
  ConfigReader top(json, source, config.defaulted);
  config.tie_word_embeddings =
      (json.contains("tie_word_embeddings") ? top : text).boolean("tie_word_embeddings", false);
  LayerShape layer;
  layer.hidden_size = config.hidden_size;
  layer.attention = attention_dims(text, config);
  layer.intermediate_size = text.positive("intermediate_size", 22016);
  config.rotary_dim = layer.attention->head_dim;
  config.layers.assign(static_cast<std::size_t>(text.positive("num_hidden_layers", 32)), layer);
  config.weights = weight_names();
  check_dims(config, source);
  return config;
}

Family family() {
  return {.title = "Qwen3-VL",
          .model_types = {kNested, "qwen3_vl_text"},
          .parse = parse,
          .presets = presets,
          .gguf_forms = {}};
}

}  // namespace heddle::models::qwen3_vl
