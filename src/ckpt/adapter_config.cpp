#include "ckpt/adapter_config.h"

#include <algorithm>
#include <cmath>
#include <set>

#include "base/errors.h"
#include "base/json.h"
#include "base/log.h"
#include "base/quote.h"
#include "base/text.h"
#include "ckpt/pattern.h"

namespace heddle::ckpt {
namespace {

using Json = nlohmann::ordered_json;

constexpr const char* kAllLinear = "all-linear";

bool is_suffix(std::string_view suffix, std::string_view module) {
  return module == suffix || (module.size() > suffix.size() && module.ends_with(suffix) &&
                              module[module.size() - suffix.size() - 1] == '.');
}

bool is_any_suffix(const std::vector<std::string>& suffixes, std::string_view module) {
  return std::any_of(suffixes.begin(), suffixes.end(),
                     [&](const std::string& suffix) { return is_suffix(suffix, module); });
}

// Expressions are compiled for every module that they are asked about.
constexpr std::size_t kMostNames = 65'536, kMostExpressions = 256;

/// Letters, digits, "_", "-" and ".": what a list of modules has.
bool is_plain(std::string_view pattern) {
  return std::ranges::all_of(pattern, [](char c) {
    return (c >= 'a' && c <= 'z') || (c >= 'A' && c <= 'Z') || (c >= '0' && c <= '9') || c == '_' ||
           c == '-' || c == '.';
  });
}

/// Whether a plain pattern, whose "." is any character, fits the module or its last parts.
bool fits_plain(std::string_view pattern, std::string_view module) {
  if (module.size() < pattern.size()) return false;
  const std::size_t before = module.size() - pattern.size();
  for (std::size_t i = 0; i < pattern.size(); ++i) {
    if (pattern[i] != '.' && pattern[i] != module[before + i]) return false;
  }
  return before == 0 || module[before - 1] == '.';
}

/// Whether an entry of modules_to_save, plain as the module is, fits it or a module that it is in.
bool is_within_plain(std::string_view saved, std::string_view module) {
  for (std::size_t end = module.find('.');; end = module.find('.', end + 1)) {
    if (fits_plain(saved, module.substr(0, end))) return true;
    if (end == std::string_view::npos) return false;
  }
}

/// The value of the first pattern that fits, as PEFT looks it up.
template <class T>
T look_up(const std::vector<std::pair<std::string, T>>& patterns, std::string_view module,
          T otherwise, const char* key) {
  const bool is_plain_module = is_plain(module);
  for (const auto& [pattern, value] : patterns) {
    if (is_plain_module && is_plain(pattern)) {
      if (fits_plain(pattern, module)) return value;
      continue;
    }
    if (Pattern("(?:.*\\.)?(?:" + pattern + ")$", std::string("adapter_config.json: ") + key)
            .matches_prefix(module)) {
      return value;
    }
  }
  return otherwise;
}

/// Reads keys of one file and says what is wrong with them.
class Reader {
 public:
  Reader(const Json& json, const std::string& file) : json_(json), file_(file) {
    for (const auto& [key, value] : json.items()) unread_.insert(key);
  }

  /// nullptr if the key is absent or null.
  const Json* find(const char* key) {
    unread_.erase(key);
    const auto found = json_.find(key);
    return found == json_.end() || found->is_null() ? nullptr : &*found;
  }

  template <class... Args>
  [[noreturn]] void fail(const char* key, fmt::format_string<Args...> format,
                         Args&&... args) const {
    throw_error<ModelError>("{}: '{}' {}", file_, key,
                            fmt::format(format, std::forward<Args>(args)...));
  }

  void read(const char* key, std::string& out) {
    if (const Json* value = find(key)) {
      if (!value->is_string()) fail(key, "must be a string, is {}", json::shown(*value));
      out = value->get<std::string>();
    }
  }
  void read(const char* key, bool& out) {
    if (const Json* value = find(key)) {
      if (!value->is_boolean()) fail(key, "must be true or false, is {}", json::shown(*value));
      out = value->get<bool>();
    }
  }
  void read(const char* key, std::int64_t& out) {
    if (const Json* value = find(key)) out = rank(key, *value);
  }
  void read(const char* key, double& out) {
    if (const Json* value = find(key)) out = number(key, *value);
  }
  void read(const char* key, std::vector<std::string>& out) {
    const Json* value = find(key);
    if (!value) return;
    if (!value->is_array()) fail(key, "must be a list of names, is {}", json::shown(*value));
    require_few(key, value->size(), kMostNames);
    for (const Json& item : *value) {
      if (!item.is_string()) fail(key, "must be a list of names, holds {}", json::shown(item));
      out.push_back(item.get<std::string>());
    }
  }
  void require_few(const char* key, std::size_t count, std::size_t most) const {
    if (count > most) fail(key, "has {} entries, at most {} are read", count, most);
  }
  /// Names in a list, or one regular expression.
  void read(const char* key, std::vector<std::string>& names, std::string& pattern) {
    const Json* value = find(key);
    if (value && value->is_string()) {
      pattern = value->get<std::string>();
      if (pattern != kAllLinear) Pattern(pattern, fmt::format("{}: '{}'", file_, key));
    } else {
      read(key, names);
    }
  }
  void read(const char* key, std::vector<std::pair<std::string, std::int64_t>>& out) {
    for_each_pattern(key, [&](const std::string& pattern, const Json& value) {
      out.emplace_back(pattern, rank(key, value));
    });
  }
  void read(const char* key, std::vector<std::pair<std::string, double>>& out) {
    for_each_pattern(key, [&](const std::string& pattern, const Json& value) {
      out.emplace_back(pattern, number(key, value));
    });
  }
  void read(const char* key, std::vector<std::int64_t>& out) {
    const Json* value = find(key);
    if (!value) return;
    for (const Json& item : value->is_array() ? *value : Json::array({*value})) {
      if (!item.is_number_integer())
        fail(key, "must be a list of layer numbers, holds {}", json::shown(item));
      out.push_back(item.get<std::int64_t>());
    }
  }

  /// The key must be absent or say that its feature is off.
  void require_off(const char* key, const char* feature) {
    const Json* value = find(key);
    if (value && !is_off(*value))
      fail(key, "is {}: {} is not supported", json::shown(*value), feature);
  }
  void ignore(const char* key) { unread_.erase(key); }
  /// Keys nobody asked for that are not off.
  std::vector<std::string> unknown() const {
    std::vector<std::string> keys;
    for (const auto& [key, value] : json_.items()) {
      if (unread_.contains(key) && !value.is_null() && !is_off(value)) keys.push_back(key);
    }
    return keys;
  }

 private:
  static bool is_off(const Json& value) {
    return value == false ||
           ((value.is_object() || value.is_array() || value.is_string()) && value.empty()) ||
           value == "";
  }
  std::int64_t rank(const char* key, const Json& value) const {
    if (!value.is_number_integer() || value.get<std::int64_t>() < 1) {
      fail(key, "must be a whole number above 0, is {}", json::shown(value));
    }
    return value.get<std::int64_t>();
  }
  double number(const char* key, const Json& value) const {
    // Far above any honest factor, and far below what a product with it makes infinite.
    constexpr double kLargest = 1e9;
    if (!value.is_number() || !(std::abs(value.get<double>()) <= kLargest))
      fail(key, "must be a number of at most {}, is {}", kLargest, json::shown(value));
    return value.get<double>();
  }
  template <class F>
  void for_each_pattern(const char* key, F&& use) {
    const Json* value = find(key);
    if (!value) return;
    if (!value->is_object())
      fail(key, "must be an object of pattern and value, is {}", json::shown(*value));
    require_few(key, value->size(), kMostNames);
    std::size_t expressions = 0;
    for (const auto& [pattern, item] : value->items()) {
      if (!is_plain(pattern) && ++expressions > kMostExpressions)
        fail(key, "has more than {} regular expressions", kMostExpressions);
      [[maybe_unused]] const Pattern compiles("(?:" + pattern + ")",
                                              fmt::format("{}: '{}'", file_, key));
      use(pattern, item);
    }
  }

  const Json& json_;
  const std::string& file_;
  std::set<std::string> unread_;
};

Json number_json(double value) {
  // PEFT declares lora_alpha as a whole number; other readers insist on it.
  if (value == std::floor(value) && std::abs(value) < 1e15) return static_cast<std::int64_t>(value);
  return value;
}

template <class T>
Json list_or_null(const std::vector<T>& values) {
  return values.empty() ? Json(nullptr) : Json(values);
}

}  // namespace

std::int64_t AdapterConfig::rank_of(std::string_view module) const {
  return look_up(rank_pattern, module, rank, "rank_pattern");
}

double AdapterConfig::alpha_of(std::string_view module) const {
  return look_up(alpha_pattern, module, alpha, "alpha_pattern");
}

double AdapterConfig::scaling_of(std::string_view module) const {
  const auto r = static_cast<double>(rank_of(module));
  return alpha_of(module) / (use_rslora ? std::sqrt(r) : r);
}

bool AdapterConfig::targets(std::string_view module) const {
  const std::string where = "adapter_config.json";
  if (is_any_suffix(exclude_modules, module)) return false;
  if (!exclude_pattern.empty() &&
      Pattern(exclude_pattern, where + ": 'exclude_modules'").matches_all(module)) {
    return false;
  }
  const bool is_plain_module = is_plain(module);
  for (const std::string& saved : modules_to_save) {
    if (is_plain_module && is_plain(saved)) {
      if (is_within_plain(saved, module)) return false;
      continue;
    }
    if (Pattern("(?:^|.*\\.)(?:" + saved + ")(?:$|\\..*)", where + ": 'modules_to_save'")
            .matches_prefix(module)) {
      return false;
    }
  }
  if (target_pattern == kAllLinear) {
    return !is_any_suffix({"lm_head", "score", "embed_tokens"}, module);
  }
  if (!target_pattern.empty())
    return Pattern(target_pattern, where + ": 'target_modules'").matches_all(module);
  if (std::find(target_modules.begin(), target_modules.end(), module) != target_modules.end())
    return true;
  if (!is_any_suffix(target_modules, module)) return false;
  if (layers_to_transform.empty()) return true;
  const auto layer = Pattern(".*?\\.[^.]*\\.(\\d{1,9})\\.", where).first_group(module);
  return layer && std::find(layers_to_transform.begin(), layers_to_transform.end(),
                            std::stoll(*layer)) != layers_to_transform.end();
}

Json AdapterConfig::to_json() const {
  Json ranks = Json::object(), alphas = Json::object();
  for (const auto& [pattern, value] : rank_pattern) ranks[pattern] = value;
  for (const auto& [pattern, value] : alpha_pattern) alphas[pattern] = number_json(value);
  const auto text_or_null = [](const std::string& text) {
    return text.empty() ? Json(nullptr) : Json(text);
  };
  Json json = {{"alpha_pattern", alphas},
               {"auto_mapping", nullptr},
               {"base_model_name_or_path", text_or_null(base_model_name_or_path)},
               {"bias", "none"},
               {"fan_in_fan_out", false},
               {"inference_mode", true},
               {"init_lora_weights", init_lora_weights},
               {"layer_replication", nullptr},
               {"layers_pattern", nullptr},
               {"layers_to_transform", list_or_null(layers_to_transform)},
               {"loftq_config", Json::object()},
               {"lora_alpha", number_json(alpha)},
               {"lora_dropout", dropout},
               {"megatron_config", nullptr},
               {"megatron_core", "megatron.core"},
               {"modules_to_save", list_or_null(modules_to_save)},
               {"peft_type", "LORA"},
               {"r", rank},
               {"rank_pattern", ranks},
               {"revision", nullptr},
               {"target_modules",
                target_pattern.empty() ? list_or_null(target_modules) : Json(target_pattern)},
               {"task_type", text_or_null(task_type)},
               {"use_dora", false},
               {"use_rslora", use_rslora}};
  // Younger keys are written only when they say something: older PEFT versions refuse keys they do
  // not know.
  if (!target_parameters.empty()) json["target_parameters"] = target_parameters;
  if (ensure_weight_tying) json["ensure_weight_tying"] = true;
  if (!exclude_pattern.empty()) {
    json["exclude_modules"] = exclude_pattern;
  } else if (!exclude_modules.empty()) {
    json["exclude_modules"] = exclude_modules;
  }
  return json;
}

AdapterConfig AdapterConfig::from_json(const Json& json, const std::string& file) {
  if (!json.is_object()) throw_error<ModelError>("{}: must hold a JSON object", file);
  Reader reader(json, file);
  AdapterConfig config;
  std::string type, bias = "none";
  reader.read("peft_type", type);
  if (type != "LORA") {
    reader.fail("peft_type", "is {}: only LORA is supported",
                type.empty() ? "missing" : "'" + text::shown(type) + "'");
  }
  reader.read("bias", bias);
  if (bias != "none") reader.fail("bias", "is '{}': only 'none' is supported", text::shown(bias));
  reader.require_off("use_dora", "DoRA");
  reader.require_off("use_qalora", "QALoRA");
  reader.require_off("use_bdlora", "BD-LoRA");
  reader.require_off("lora_bias", "a bias in lora_B");
  reader.require_off("fan_in_fan_out", "a transposed weight");
  reader.require_off("layer_replication", "layer replication");
  reader.require_off("layers_pattern", "a pattern of layer lists");
  reader.require_off("trainable_token_indices", "training of single tokens");
  reader.require_off("alora_invocation_tokens", "activated LoRA");
  reader.require_off("arrow_config", "Arrow");
  reader.require_off("kasa_config", "KaSA");
  reader.require_off("monteclora_config", "MonteCLoRA");
  reader.require_off("velora_config", "VeLoRA");
  reader.require_off("loftq_config", "LoftQ, which changes the base weights,");
  reader.require_off("corda_config", "CorDA, which changes the base weights,");
  reader.require_off("lora_ga_config", "LoRA-GA, which changes the base weights,");
  reader.require_off("megatron_config", "a Megatron layer");

  reader.read("base_model_name_or_path", config.base_model_name_or_path);
  config.task_type.clear();
  reader.read("task_type", config.task_type);
  reader.read("r", config.rank);
  reader.read("lora_alpha", config.alpha);
  reader.read("lora_dropout", config.dropout);
  if (config.dropout < 0 || config.dropout >= 1) {
    reader.fail("lora_dropout", "must be in [0, 1), is {}", config.dropout);
  }
  reader.read("use_rslora", config.use_rslora);
  reader.read("target_modules", config.target_modules, config.target_pattern);
  reader.read("exclude_modules", config.exclude_modules, config.exclude_pattern);
  reader.read("target_parameters", config.target_parameters);
  reader.read("modules_to_save", config.modules_to_save);
  const auto expressions = std::ranges::count_if(
      config.modules_to_save, [](const std::string& name) { return !is_plain(name); });
  if (static_cast<std::size_t>(expressions) > kMostExpressions) {
    reader.fail("modules_to_save", "has more than {} regular expressions", kMostExpressions);
  }
  reader.read("ensure_weight_tying", config.ensure_weight_tying);
  reader.read("rank_pattern", config.rank_pattern);
  reader.read("alpha_pattern", config.alpha_pattern);
  reader.read("layers_to_transform", config.layers_to_transform);
  if (const Json* init = reader.find("init_lora_weights")) {
    // Only these leave the base weights as they are; the others store the adapter relative to a
    // changed base.
    const bool is_supported = init->is_boolean() || *init == "gaussian" || *init == "eva";
    if (!is_supported) {
      reader.fail("init_lora_weights",
                  "is {}: the adapter belongs to changed base weights, which is not supported; "
                  "convert it with PEFT's path_initial_model_for_weight_conversion",
                  json::shown(*init));
    }
    config.init_lora_weights = *init;
  }
  if (config.target_modules.empty() && config.target_pattern.empty() &&
      config.target_parameters.empty()) {
    reader.fail("target_modules", "names nothing, and neither does 'target_parameters'");
  }
  for (const char* key : {"auto_mapping", "inference_mode", "revision", "peft_version",
                          "megatron_core", "eva_config", "qalora_group_size", "runtime_config"}) {
    reader.ignore(key);
  }
  if (const auto unknown = reader.unknown(); !unknown.empty()) {
    log::warning("{}: keys that are not known here are not used: {}", file,
                 text::list_some(unknown));
  }
  return config;
}

}  // namespace heddle::ckpt
