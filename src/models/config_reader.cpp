#include "models/config_reader.h"

#include <cmath>
#include <set>
#include <utility>

#include "base/errors.h"
#include "base/json.h"
#include "base/quote.h"

namespace heddle::models {
namespace {

/// Far above any model, and small enough for the product of three to fit 64 bits before they are
/// held against the weights in the files.
std::int64_t most_of(std::string_view key) {
  const auto has = [&](const char* part) { return key.find(part) != std::string_view::npos; };
  if (has("layers")) return 1 << 14;
  if (has("heads") || has("head_dim") || has("kernel") || has("experts")) return 1 << 16;
  if (has("hidden_size") || has("intermediate_size")) return 1 << 20;
  return 1 << 24;
}

bool is_above_zero(const Json& value) {
  return value.is_number() && value.get<double>() > 0 &&
         value.get<double>() <= ConfigReader::kLargestNumber;
}

}  // namespace

bool ConfigReader::has(const char* key) const {
  return json_.contains(key) && !json_[key].is_null();
}

std::int64_t ConfigReader::positive(const char* key, std::int64_t fallback) {
  if (!has(key)) {
    defaulted_.push_back(fmt::format("{} = {}", key, fallback));
    return fallback;
  }
  const std::int64_t most = most_of(key);
  // A number without a sign may be beyond 64 bits with one.
  if (!json_[key].is_number_integer() || json_[key] < 1 || json_[key] > most)
    fail(key, fmt::format("an integer from 1 to {}", most));
  return json_[key].get<std::int64_t>();
}

double ConfigReader::above_zero(const char* key, double fallback) {
  if (has(key) && !is_above_zero(json_[key])) fail(key, "a number above 0");
  return number(key, fallback);
}

double ConfigReader::number(const char* key, double fallback) {
  if (!has(key)) {
    defaulted_.push_back(fmt::format("{} = {}", key, fallback));
    return fallback;
  }
  if (!json_[key].is_number() || !(std::abs(json_[key].get<double>()) <= kLargestNumber))
    fail(key, fmt::format("a number of at most {}", kLargestNumber));
  return json_[key].get<double>();
}

bool ConfigReader::boolean(const char* key, bool fallback) {
  if (!has(key)) {
    defaulted_.push_back(fmt::format("{} = {}", key, fallback));
    return fallback;
  }
  if (!json_[key].is_boolean()) fail(key, "true or false");
  return json_[key].get<bool>();
}

std::vector<std::int64_t> ConfigReader::integers(const char* key) const {
  return has(key) ? integers_of(key, json_[key]) : std::vector<std::int64_t>();
}

std::vector<std::int64_t> ConfigReader::rope_integers(const char* key) const {
  const Json* value = rope(key);
  return value != nullptr ? integers_of(key, *value) : std::vector<std::int64_t>();
}

std::vector<std::int64_t> ConfigReader::integers_of(const char* key, const Json& value) const {
  const Json list = value.is_array() ? value : Json::array({value});
  std::vector<std::int64_t> values;
  for (const Json& item : list) {
    if (!item.is_number_integer() || item < 0 || item > most_of("")) {
      throw_error<ModelError>(
          "{}: '{}' is {}: expected a whole number from 0 to {}, or a list of them", source_, key,
          json::shown(value), most_of(""));
    }
    values.push_back(item.get<std::int64_t>());
  }
  return values;
}

void ConfigReader::require(const char* key, const Json& built) const {
  if (has(key) && json_[key] != built) fail(key, json::shown(built));
}

void ConfigReader::fail(const char* key, const std::string& expected) const {
  throw_error<ModelError>("{}: '{}' is {}: expected {}", source_, key,
                          json_.contains(key) ? json::shown(json_[key]) : "missing", expected);
}

namespace {

const Json* rope_object(const Json& json) {
  for (const char* key : {"rope_parameters", "rope_scaling"}) {
    if (json.contains(key) && json[key].is_object() && !json[key].empty()) return &json[key];
  }
  return nullptr;
}

}  // namespace

const Json* ConfigReader::rope(const char* key) const {
  const Json* rope = rope_object(json_);
  if (rope != nullptr && rope->contains(key) && !(*rope)[key].is_null()) return &(*rope)[key];
  return has(key) ? &json_[key] : nullptr;
}

double ConfigReader::rope_number(const char* key, double fallback, double most) {
  const Json* value = rope(key);
  if (value == nullptr) {
    defaulted_.push_back(fmt::format("{} = {}", key, fallback));
    return fallback;
  }
  if (!is_above_zero(*value) || value->get<double>() > most) {
    throw_error<ModelError>("{}: '{}' is {}: expected a number above 0, at most {}", source_, key,
                            json::shown(*value), most);
  }
  return value->get<double>();
}

void ConfigReader::require_plain_rope() const {
  const Json* rope = rope_object(json_);
  if (rope == nullptr) return;
  const auto scaling = json_.find("rope_scaling");
  if (scaling != json_.end() && scaling->is_object() && !scaling->empty() && *scaling != *rope) {
    throw_error<ModelError>(
        "{}: 'rope_parameters' {} and 'rope_scaling' {} differ: remove the one that is not meant "
        "(transformers takes rope_scaling)",
        source_, json::shown(*rope), json::shown(*scaling));
  }
  const Json* type = rope->contains("rope_type") ? &(*rope)["rope_type"]
                     : rope->contains("type")    ? &(*rope)["type"]
                                                 : nullptr;
  if (type != nullptr && !type->is_null() && *type != "default" && *type != "mrope") {
    throw_error<ModelError>(
        "{}: rope_type is '{}': only 'default' is built", source_,
        type->is_string() ? text::shown(type->get<std::string>()) : json::shown(*type));
  }
}

namespace {

/// Keys that the model's code does not use and its files' readers do.
void check_descriptions(ConfigReader& reader) {
  for (const char* key : {"eos_token_id", "bos_token_id"}) reader.integers(key);
  if (reader.has("max_position_embeddings")) reader.positive("max_position_embeddings", 1);
  for (const char* key : {"dtype", "torch_dtype"}) {
    const std::set<Json> known = {"float64", "float32", "bfloat16", "float16", "auto"};
    if (reader.has(key) && !known.contains(reader.json()[key]))
      reader.fail(key, "float32, bfloat16, float16 or float64");
  }
}

}  // namespace

const Json& text_of(const Json& top, const Config& config, const std::string& source) {
  if (!config.nested) return top;
  if (!top.contains("text_config") || !top["text_config"].is_object()) {
    throw_error<ModelError>("{}: model_type '{}' needs an object 'text_config'", source,
                            config.model_type);
  }
  return top["text_config"];
}

void read_mrope_section(const ConfigReader& text, std::vector<std::int64_t> fallback,
                        Config& config) {
  config.mrope_section = text.rope_integers("mrope_section");
  if (config.mrope_section.empty()) config.mrope_section = std::move(fallback);
}

void read_common(ConfigReader& text, const Json& top, Config& config) {
  config.rms_norm_eps = text.above_zero("rms_norm_eps", 1e-6);
  config.initializer_range = text.number("initializer_range", 0.02);
  if (!(config.initializer_range >= 0 && config.initializer_range <= ConfigReader::kLargestNumber))
    text.fail("initializer_range", "a number from 0 on");
  text.require("hidden_act", "silu");
  text.require("attention_bias", false);
  text.require_plain_rope();
  std::vector<std::string> unused;
  ConfigReader labels(top, text.source(), unused);
  check_descriptions(text);
  check_descriptions(labels);
  if (labels.has("num_labels")) config.num_labels = labels.positive("num_labels", 1);
  if (top.contains("id2label") && top["id2label"].is_object())
    config.num_labels = static_cast<std::int64_t>(top["id2label"].size());
}

std::vector<bool> read_sparse_layers(ConfigReader& text, std::int64_t layers) {
  const std::int64_t step = text.positive("decoder_sparse_step", 1);
  std::vector<bool> sparse(static_cast<std::size_t>(layers));
  for (std::int64_t i = 0; i < layers; ++i) sparse[i] = (i + 1) % step == 0;
  for (const std::int64_t dense : text.integers("mlp_only_layers"))
    if (dense < layers) sparse[dense] = false;
  return sparse;
}

void require_divides(const std::string& source, const char* small, std::int64_t a,
                     const char* large, std::int64_t b) {
  if (b % a != 0)
    throw_error<ModelError>("{}: {} ({}) does not divide {} ({})", source, small, a, large, b);
}

void check_dims(const Config& config, const std::string& source) {
  if (const nn::AttentionDims* attention = config.attention()) {
    require_divides(source, "num_key_value_heads", attention->num_key_value_heads,
                    "num_attention_heads", attention->num_attention_heads);
  }
  const std::int64_t head_dim = config.attention() != nullptr ? config.attention()->head_dim : 0;
  if (config.rotary_dim < 2 || config.rotary_dim % 2 != 0 ||
      (head_dim > 0 && config.rotary_dim > head_dim)) {
    throw_error<ModelError>(
        "{}: {} entries of a head of {} are rotated: expected an even number from 2 to head_dim "
        "(head_dim, partial_rotary_factor)",
        source, config.rotary_dim, head_dim);
  }
  const nn::MoeDims* moe = config.moe();
  if (moe != nullptr && moe->num_experts_per_tok > moe->num_experts) {
    throw_error<ModelError>("{}: num_experts_per_tok ({}) exceeds num_experts ({})", source,
                            moe->num_experts_per_tok, moe->num_experts);
  }
}

}  // namespace heddle::models
