#include "models/registry.h"

#include <algorithm>

#include "base/errors.h"
#include "base/quote.h"
#include "base/text.h"
#include "models/qwen3/family.h"
#include "models/qwen3_5/family.h"
#include "models/qwen3_vl/family.h"

namespace heddle::models {
namespace {

const std::vector<Family>& families() {
  static const std::vector<Family> all = {
      qwen3_5::family(),
      qwen3::family(),
      qwen3_vl::family(),
  };
  return all;
}

std::vector<std::pair<std::string, Json>> all_presets() {
  std::vector<std::pair<std::string, Json>> all;
  for (const Family& family : families()) {
    for (auto& preset : family.presets()) all.push_back(std::move(preset));
  }
  return all;
}

}  // namespace

Config parse_config(const Json& json, const std::string& source) {
  if (!json.is_object() || !json.contains("model_type") || !json["model_type"].is_string()) {
    throw_error<ModelError>("{}: 'model_type' is missing: expected a Hugging Face config.json",
                            source);
  }
  const auto type = json["model_type"].get<std::string>();
  std::vector<std::string> known;
  for (const Family& family : families()) {
    const std::vector<std::string>& types = family.model_types;
    if (std::find(types.begin(), types.end(), type) != types.end())
      return family.parse(json, source);
    known.insert(known.end(), types.begin(), types.end());
  }
  throw_error<ModelError>("{}: model_type '{}' is not one of {}", source, text::shown(type),
                          text::join(known, ", "));
}

std::string family_titles() {
  std::vector<std::string> titles;
  for (const Family& family : families()) titles.push_back(family.title);
  return text::join(titles, ", ");
}

std::optional<GgufForm> gguf_form(const std::string& model_type) {
  for (const Family& family : families()) {
    const auto found = family.gguf_forms.find(model_type);
    if (found != family.gguf_forms.end()) return found->second;
  }
  return {};
}

Json preset_json(const std::string& name) {
  for (auto& [known, json] : all_presets()) {
    if (known == name) return std::move(json);
  }
  throw_error<ConfigError>("unknown preset '{}'; known: {}", name,
                           text::join(preset_names(), ", "));
}

Config preset(const std::string& name) { return parse_config(preset_json(name), name); }

std::vector<std::string> preset_names() {
  std::vector<std::string> names;
  for (const auto& [name, json] : all_presets()) names.push_back(name);
  return names;
}

}  // namespace heddle::models
