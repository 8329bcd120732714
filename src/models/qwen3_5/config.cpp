#include "models/qwen3_5/config.h"

#include <algorithm>
#include <limits>
#include <set>

#include "base/errors.h"
#include "base/json.h"
#include "base/quote.h"
#include "base/text.h"

namespace heddle::models::qwen3_5 {
namespace {

using Json = nlohmann::ordered_json;

// Far above any model, and small enough for the product of four to fit 64 bits after each is held
// against the weights.
constexpr std::int64_t kMostElements = 1 << 24;  // of one dimension
constexpr std::int64_t kMostWidth = 1 << 20, kMostHeads = 1 << 16, kMostLayers = 1 << 14;
constexpr double kLargestNumber = 1e15;

/// Reads keys of one JSON object, remembers what was defaulted, and names the key in every error.
class Reader {
 public:
  Reader(const Json& json, std::string source, std::vector<std::string>& defaulted)
      : json_(json), source_(std::move(source)), defaulted_(defaulted) {}

  bool has(const char* key) const { return json_.contains(key) && !json_[key].is_null(); }

  std::int64_t integer(const char* key, std::int64_t fallback) {
    if (!has(key)) return note(key, fallback);
    // Also where 64 bits are too few, which a number without a sign shows as another type.
    if (!json_[key].is_number_integer() || json_[key] > std::numeric_limits<std::int64_t>::max())
      fail(key, "an integer");
    return json_[key].get<std::int64_t>();
  }
  std::int64_t positive(const char* key, std::int64_t fallback, std::int64_t most = kMostElements) {
    const std::int64_t value = integer(key, fallback);
    if (value < 1 || value > most) fail(key, fmt::format("an integer from 1 to {}", most));
    return value;
  }
  double number(const char* key, double fallback) {
    if (!has(key)) return note(key, fallback);
    if (!json_[key].is_number()) fail(key, "a number");
    return json_[key].get<double>();
  }
  /// From a factor or a width that a computation divides by or takes the root of.
  double above_zero(const char* key, double fallback) {
    const double value = number(key, fallback);
    if (!(value > 0 && value <= kLargestNumber)) fail(key, "a number above 0");
    return value;
  }
  bool boolean(const char* key, bool fallback) {
    if (!has(key)) return note(key, fallback);
    if (!json_[key].is_boolean()) fail(key, "true or false");
    return json_[key].get<bool>();
  }
  [[noreturn]] void fail(const char* key, const std::string& expected) const {
    throw_error<ModelError>("{}: '{}' is {}: expected {}", source_, key,
                            json_.contains(key) ? json::shown(json_[key]) : "missing", expected);
  }

 private:
  template <class T>
  T note(const char* key, T value) {
    defaulted_.push_back(fmt::format("{} = {}", key, value));
    return value;
  }

  const Json& json_;
  std::string source_;
  std::vector<std::string>& defaulted_;
};

std::vector<std::int64_t> integers(const Json& json, const char* key,
                                    const std::string& source) {
  if (!json.contains(key) || json[key].is_null()) return {};
  std::vector<std::int64_t> values;
  for (const Json& value : json[key].is_array() ? json[key] : Json::array({json[key]})) {
    if (!value.is_number_integer() || value < 0 || value > kMostElements) {
      throw_error<ModelError>("{}: '{}' is {}: expected a number from 0 on, or a list of them",
                              source, key, json::shown(json[key]));
    }
    values.push_back(value.get<std::int64_t>());
  }
  return values;
}

std::vector<bool> layer_kinds(const Json& text, std::int64_t layers, const std::string& source) {
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
    const std::string type = types[i].is_string() ? types[i].get<std::string>() : json::shown(types[i]);
    if (type != "full_attention" && type != "linear_attention") {
      throw_error<ModelError>(
          "{}: layer_types[{}] is '{}': expected full_attention or linear_attention", source, i,
          text::shown(type));
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

void read_rope(const Json& text, Config& config, const std::string& source) {
  const Json* rope = nullptr;
  for (const char* key : {"rope_parameters", "rope_scaling"}) {
    if (text.contains(key) && text[key].is_object() && rope == nullptr) rope = &text[key];
  }
  const auto find = [&](const char* key) -> const Json* {
    if (rope != nullptr && rope->contains(key) && !(*rope)[key].is_null()) return &(*rope)[key];
    if (text.contains(key) && !text[key].is_null()) return &text[key];
    return nullptr;
  };
  const auto number = [&](const char* key, double fallback) {
    const Json* value = find(key);
    if (value == nullptr) {
      config.defaulted.push_back(fmt::format("{} = {}", key, fallback));
      return fallback;
    }
    if (!value->is_number())
      throw_error<ModelError>("{}: '{}' is {}: expected a number", source, key, json::shown(*value));
    const double found = value->get<double>();
    if (!(found > 0 && found <= kLargestNumber)) {
      throw_error<ModelError>("{}: '{}' is {}: expected a number above 0", source, key, found);
    }
    return found;
  };
  config.rope_theta = number("rope_theta", 10000);
  config.partial_rotary_factor = number("partial_rotary_factor", 0.25);
  const Json* type = rope != nullptr && rope->contains("rope_type") ? &(*rope)["rope_type"]
                     : rope != nullptr && rope->contains("type")    ? &(*rope)["type"]
                                                                    : nullptr;
  if (type != nullptr && type->is_string() && *type != "default" && *type != "mrope") {
    throw_error<ModelError>("{}: rope_type is '{}': only 'default' is built", source,
                            type->get<std::string>());
  }
  config.mrope_section = {11, 11, 10};
  if (find("mrope_section") != nullptr) {
    const bool is_inside = rope != nullptr && rope->contains("mrope_section");
    config.mrope_section = integers(is_inside ? *rope : text, "mrope_section", source);
  }
}

void check(const Config& config, const std::string& source) {
  if (!(config.partial_rotary_factor <= 1)) {
    throw_error<ModelError>("{}: 'partial_rotary_factor' is {}: expected a number in (0, 1]", source,
                            config.partial_rotary_factor);
  }
  const auto divides = [&](const char* small, std::int64_t a, const char* large, std::int64_t b) {
    if (b % a != 0)
      throw_error<ModelError>("{}: {} ({}) does not divide {} ({})", source, small, a, large, b);
  };
  divides("num_key_value_heads", config.num_key_value_heads, "num_attention_heads",
          config.num_attention_heads);
  divides("linear_num_key_heads", config.linear_num_key_heads, "linear_num_value_heads",
          config.linear_num_value_heads);
  if (config.rotary_dim() < 2 || config.rotary_dim() % 2 != 0) {
    throw_error<ModelError>(
        "{}: head_dim x partial_rotary_factor is {}: expected an even number of at least 2", source,
        config.rotary_dim());
  }
  if (config.is_moe() && config.num_experts_per_tok > config.num_experts) {
    throw_error<ModelError>("{}: num_experts_per_tok ({}) exceeds num_experts ({})", source,
                            config.num_experts_per_tok, config.num_experts);
  }
}

}  // namespace

Config parse_config(const Json& json, const std::string& source) {
  static const std::set<std::string> kNested = {"qwen3_5", "qwen3_5_moe"};
  static const std::set<std::string> kFlat = {"qwen3_5_text", "qwen3_5_moe_text", "qwen3_next"};
  Config config;
  if (!json.is_object() || !json.contains("model_type") || !json["model_type"].is_string()) {
    throw_error<ModelError>("{}: 'model_type' is missing: expected a Hugging Face config.json",
                            source);
  }
  config.model_type = json["model_type"].get<std::string>();
  config.nested = kNested.count(config.model_type) > 0;
  if (!config.nested && kFlat.count(config.model_type) == 0) {
    throw_error<ModelError>(
        "{}: model_type '{}' is not one of qwen3_5, qwen3_5_text, qwen3_5_moe, qwen3_5_moe_text, "
        "qwen3_next",
        source, text::shown(config.model_type));
  }
  if (config.nested && (!json.contains("text_config") || !json["text_config"].is_object())) {
    throw_error<ModelError>("{}: model_type '{}' needs an object 'text_config'", source,
                            config.model_type);
  }
  const Json& text = config.nested ? json["text_config"] : json;
  config.text_model_type = config.nested ? config.model_type + "_text" : config.model_type;
  const bool moe = config.text_model_type != "qwen3_5_text";
  const bool next = config.text_model_type == "qwen3_next";

  // The defaults are those of the configuration class of transformers for this model type.
  Reader read(text, source, config.defaulted);
  config.vocab_size = read.positive("vocab_size", next ? 151936 : 248320);
  config.hidden_size = read.positive("hidden_size", moe ? 2048 : 4096, kMostWidth);
  if (!moe || next)
    config.intermediate_size = read.positive("intermediate_size", next ? 5632 : 12288);
  config.num_hidden_layers = read.positive("num_hidden_layers", next ? 48 : moe ? 40 : 32, kMostLayers);
  config.num_attention_heads = read.positive("num_attention_heads", 16, kMostHeads);
  config.num_key_value_heads = read.positive("num_key_value_heads", moe ? 2 : 4, kMostHeads);
  config.head_dim = read.positive("head_dim", 256, kMostHeads);
  config.rms_norm_eps = read.above_zero("rms_norm_eps", 1e-6);
  config.initializer_range = read.number("initializer_range", 0.02);
  config.max_position_embeddings = read.positive("max_position_embeddings", 32768, std::int64_t{1} << 40);
  config.full_attention = layer_kinds(text, config.num_hidden_layers, source);
  config.linear_conv_kernel_dim = read.positive("linear_conv_kernel_dim", 4, kMostHeads);
  config.linear_key_head_dim = read.positive("linear_key_head_dim", 128, kMostHeads);
  config.linear_value_head_dim = read.positive("linear_value_head_dim", 128, kMostHeads);
  config.linear_num_key_heads = read.positive("linear_num_key_heads", 16, kMostHeads);
  config.linear_num_value_heads = read.positive("linear_num_value_heads", 32, kMostHeads);
  read_rope(text, config, source);
  if (read.has("hidden_act") && text["hidden_act"] != "silu") read.fail("hidden_act", "\"silu\"");
  if (read.has("attention_bias") && text["attention_bias"] != false)
    read.fail("attention_bias", "false");
  if (read.has("attn_output_gate") && text["attn_output_gate"] != true)
    read.fail("attn_output_gate", "true");

  // Multimodal files give it at the top level, and then that value decides.
  config.tie_word_embeddings =
      config.nested && json.contains("tie_word_embeddings")
          ? Reader(json, source, config.defaulted).boolean("tie_word_embeddings", false)
          : read.boolean("tie_word_embeddings", false);

  config.sparse_mlp.assign(config.num_hidden_layers, moe);
  if (moe) {
    config.num_experts = read.positive("num_experts", next ? 512 : 256, kMostHeads);
    config.num_experts_per_tok = read.positive("num_experts_per_tok", next ? 10 : 8, kMostHeads);
    config.moe_intermediate_size = read.positive("moe_intermediate_size", 512, kMostWidth);
    config.shared_expert_intermediate_size = read.positive("shared_expert_intermediate_size", 512, kMostWidth);
    config.norm_topk_prob = next ? read.boolean("norm_topk_prob", true) : true;
    config.output_router_logits = read.boolean("output_router_logits", false);
    config.router_aux_loss_coef = read.number("router_aux_loss_coef", 0.001);
  }
  if (next) {
    const std::int64_t step = read.positive("decoder_sparse_step", 1);
    const auto dense = integers(text, "mlp_only_layers", source);
    for (std::int64_t i = 0; i < config.num_hidden_layers; ++i) {
      config.sparse_mlp[i] =
          (i + 1) % step == 0 && std::find(dense.begin(), dense.end(), i) == dense.end();
    }
  }
  if (json.contains("num_labels") && json["num_labels"].is_number_integer())
    config.num_labels = Reader(json, source, config.defaulted).positive("num_labels", 1);
  if (json.contains("id2label") && json["id2label"].is_object()) {
    config.num_labels = static_cast<std::int64_t>(json["id2label"].size());
  }
  config.eos_token_ids = integers(text, "eos_token_id", source);
  if (const auto pad = integers(text, "pad_token_id", source); !pad.empty())
    config.pad_token_id = pad.front();
  check(config, source);
  return config;
}

nlohmann::ordered_json to_json(const Config& config) {
  Json json;
  const bool next = config.text_model_type == "qwen3_next";
  json["architectures"] = {next              ? "Qwen3NextForCausalLM"
                           : config.is_moe() ? "Qwen3_5MoeForCausalLM"
                                             : "Qwen3_5ForCausalLM"};
  json["model_type"] = config.text_model_type;
  json["vocab_size"] = config.vocab_size;
  json["hidden_size"] = config.hidden_size;
  if (config.intermediate_size > 0) json["intermediate_size"] = config.intermediate_size;
  json["num_hidden_layers"] = config.num_hidden_layers;
  json["num_attention_heads"] = config.num_attention_heads;
  json["num_key_value_heads"] = config.num_key_value_heads;
  json["head_dim"] = config.head_dim;
  json["hidden_act"] = "silu";
  json["rms_norm_eps"] = config.rms_norm_eps;
  json["initializer_range"] = config.initializer_range;
  json["tie_word_embeddings"] = config.tie_word_embeddings;
  json["max_position_embeddings"] = config.max_position_embeddings;
  json["attention_bias"] = false;
  json["layer_types"] = Json::array();
  for (const bool full : config.full_attention) {
    json["layer_types"].push_back(full ? "full_attention" : "linear_attention");
  }
  json["linear_conv_kernel_dim"] = config.linear_conv_kernel_dim;
  json["linear_key_head_dim"] = config.linear_key_head_dim;
  json["linear_value_head_dim"] = config.linear_value_head_dim;
  json["linear_num_key_heads"] = config.linear_num_key_heads;
  json["linear_num_value_heads"] = config.linear_num_value_heads;
  json["rope_parameters"] = {{"rope_type", "default"},
                             {"rope_theta", config.rope_theta},
                             {"partial_rotary_factor", config.partial_rotary_factor}};
  if (!next) {
    json["rope_parameters"]["mrope_section"] = config.mrope_section;
    json["rope_parameters"]["mrope_interleaved"] = true;
  }
  if (config.is_moe()) {
    json["num_experts"] = config.num_experts;
    json["num_experts_per_tok"] = config.num_experts_per_tok;
    json["moe_intermediate_size"] = config.moe_intermediate_size;
    json["shared_expert_intermediate_size"] = config.shared_expert_intermediate_size;
    json["output_router_logits"] = config.output_router_logits;
    json["router_aux_loss_coef"] = config.router_aux_loss_coef;
  }
  if (next) {
    json["norm_topk_prob"] = config.norm_topk_prob;
    json["decoder_sparse_step"] = 1;
    json["mlp_only_layers"] = Json::array();
  }
  if (!config.eos_token_ids.empty()) json["eos_token_id"] = config.eos_token_ids.front();
  if (config.pad_token_id >= 0) json["pad_token_id"] = config.pad_token_id;
  return json;
}

}  // namespace heddle::models::qwen3_5
