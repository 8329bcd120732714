#include <algorithm>

#include "base/errors.h"
#include "base/json.h"
#include "base/quote.h"
#include "models/config_reader.h"
#include "models/qwen3_5/family.h"

namespace heddle::models::qwen3_5 {
namespace {

/// By layer: full attention instead of Gated DeltaNet.
std::vector<bool> attention_layers(const Json& text, std::int64_t layers,
                                   const std::string& source) {
  const bool has_types = text.contains("layer_types") && text["layer_types"].is_array();
  const bool has_interval = text.contains("full_attention_interval") &&
                            text["full_attention_interval"].is_number_integer();
  const std::int64_t interval =
      has_interval ? text["full_attention_interval"].get<std::int64_t>() : 4;
  if (interval < 1)
    throw_error<ModelError>("{}: full_attention_interval is {}: expected at least 1", source,
                            interval);
  std::vector<bool> from_interval(layers);
  for (std::int64_t i = 0; i < layers; ++i) from_interval[i] = (i + 1) % interval == 0;
  if (!has_types) return from_interval;

  const Json& types = text["layer_types"];
  if (static_cast<std::int64_t>(types.size()) != layers) {
    throw_error<ModelError>("{}: layer_types has {} entries, num_hidden_layers is {}", source,
                            types.size(), layers);
  }
  std::vector<bool> full(layers);
  for (std::int64_t i = 0; i < layers; ++i) {
    const std::string type =
        types[i].is_string() ? types[i].get<std::string>() : json::shown(types[i]);
    if (type != "full_attention" && type != "linear_attention") {
      throw_error<ModelError>(
          "{}: layer_types[{}] is '{}': expected full_attention or linear_attention", source, i,
          heddle::text::shown(type));
    }
    full[i] = type == "full_attention";
    if (has_interval && full[i] != from_interval[i]) {
      throw_error<ModelError>(
          "{}: layer_types[{}] is '{}', which contradicts full_attention_interval {}", source, i,
          type, interval);
    }
  }
  return full;
}

/// The defaults below are those of the configuration class of transformers for this model type.
struct Variant {
  bool moe, next;
};

nn::AttentionDims attention_dims(ConfigReader& text, const Config& config, Variant of) {
  nn::AttentionDims dims{};
  dims.hidden_size = config.hidden_size;
  dims.num_attention_heads = text.positive("num_attention_heads", 16);
  dims.num_key_value_heads = text.positive("num_key_value_heads", of.moe ? 2 : 4);
  dims.head_dim = text.positive("head_dim", 256);
  dims.rms_norm_eps = config.rms_norm_eps;
  dims.norm_offset = config.norm_offset;
  dims.has_output_gate = true;
  text.require("attn_output_gate", true);
  return dims;
}

nn::GatedDeltaNetDims delta_net_dims(ConfigReader& text, const Config& config, Variant of) {
  nn::GatedDeltaNetDims dims{};
  dims.hidden_size = config.hidden_size;
  dims.conv_kernel = text.positive("linear_conv_kernel_dim", 4);
  dims.key_head_dim = text.positive("linear_key_head_dim", 128);
  dims.value_head_dim = text.positive("linear_value_head_dim", 128);
  dims.num_key_heads = text.positive("linear_num_key_heads", 16);
  dims.num_value_heads = text.positive("linear_num_value_heads", 32);
  dims.rms_norm_eps = config.rms_norm_eps;
  dims.interleaved_projections = of.next;
  dims.keeps_convolution = of.moe;
  require_divides(text.source(), "linear_num_key_heads", dims.num_key_heads,
                  "linear_num_value_heads", dims.num_value_heads);
  return dims;
}

nn::MoeDims moe_dims(ConfigReader& text, const Config& config, Variant of) {
  nn::MoeDims dims{};
  dims.hidden_size = config.hidden_size;
  dims.num_experts = text.positive("num_experts", of.next ? 512 : 256);
  dims.num_experts_per_tok = text.positive("num_experts_per_tok", of.next ? 10 : 8);
  dims.moe_intermediate_size = text.positive("moe_intermediate_size", 512);
  dims.shared_expert_intermediate_size = text.positive("shared_expert_intermediate_size", 512);
  dims.normalize_top_k = of.next ? text.boolean("norm_topk_prob", true) : true;
  return dims;
}

void read_layers(ConfigReader& text, Config& config, Variant of) {
  const std::int64_t count = text.positive("num_hidden_layers", of.next ? 48 : of.moe ? 40 : 32);
  const std::vector<bool> full = attention_layers(text.json(), count, text.source());
  const nn::AttentionDims attention = attention_dims(text, config, of);
  const nn::GatedDeltaNetDims delta_net = delta_net_dims(text, config, of);
  const double rotated = text.rope_number("partial_rotary_factor", 0.25, 1);
  config.rotary_dim = static_cast<std::int64_t>(static_cast<double>(attention.head_dim) * rotated);
  std::int64_t width = 0;
  if (!of.moe || of.next) width = text.positive("intermediate_size", of.next ? 5632 : 12288);
  std::optional<nn::MoeDims> moe;
  if (of.moe) {
    moe = moe_dims(text, config, of);
    config.output_router_logits = text.boolean("output_router_logits", false);
    config.router_aux_loss_coef = text.number("router_aux_loss_coef", 0.001);
  }
  std::vector<bool> sparse(static_cast<std::size_t>(count), of.moe);
  if (of.next) sparse = read_sparse_layers(text, count);
  for (std::int64_t i = 0; i < count; ++i) {
    LayerShape layer;
    layer.hidden_size = config.hidden_size;
    if (full[i]) layer.attention = attention;
    if (!full[i]) layer.gated_delta_net = delta_net;
    if (sparse[i]) layer.moe = moe;
    if (!sparse[i]) layer.intermediate_size = width;
    config.layers.push_back(layer);
  }
}

}  // namespace

Config parse(const Json& json, const std::string& source) {
  Config config;
  config.model_type = json["model_type"].get<std::string>();
  config.nested = config.model_type == "qwen3_5" || config.model_type == "qwen3_5_moe";
  const std::string type = config.nested ? config.model_type + "_text" : config.model_type;
  const Variant of = {type != "qwen3_5_text", type == "qwen3_next"};
  ConfigReader text(text_of(json, config, source), source, config.defaulted);
  config.weights = weight_names(type, config.nested);
  config.vocab_size = text.positive("vocab_size", of.next ? 151936 : 248320);
  config.hidden_size = text.positive("hidden_size", of.moe ? 2048 : 4096);
  config.norm_offset = 1;
  read_common(text, json, config);
  config.rope_theta = text.rope_number("rope_theta", 10000);
  read_mrope_section(text, {11, 11, 10}, config);
  // Multimodal files give it at the top level, and then that value decides.
  ConfigReader top(json, source, config.defaulted);
  config.tie_word_embeddings = config.nested && json.contains("tie_word_embeddings")
                                   ? top.boolean("tie_word_embeddings", false)
                                   : text.boolean("tie_word_embeddings", false);
  read_layers(text, config, of);
  check_dims(config, source);
  return config;
}

Family family() {
  const GgufForm next = {"qwen3next", true, false}, dense = {"qwen35", true, true},
                 moe = {"qwen35moe", true, true};
  return {"Qwen3.5, Qwen3.6, Qwen3-Next",
          {"qwen3_5", "qwen3_5_text", "qwen3_5_moe", "qwen3_5_moe_text", "qwen3_next"},
          parse,
          presets,
          {{"qwen3_5", dense},
           {"qwen3_5_text", dense},
           {"qwen3_5_moe", moe},
           {"qwen3_5_moe_text", moe},
           {"qwen3_next", next}}};
}

}  // namespace heddle::models::qwen3_5
