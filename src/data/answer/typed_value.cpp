#include "data/answer/typed_value.h"

#include <algorithm>
#include <optional>
#include <set>
#include <string>

#include "base/errors.h"
#include "base/text.h"
#include "data/json/json_text.h"

namespace heddle::data {
namespace {

using nlohmann::ordered_json;

std::string type_of(const ordered_json& value) {
  if (json_text::big_integer(value) || value.is_number_integer()) return "integer";
  return json_text::type_name(value);
}

/// The names of the types that a schema allows; empty: it says nothing.
std::set<std::string> types_of(const ordered_json& schema) {
  std::set<std::string> types;
  if (!schema.is_object()) return types;
  if (const auto type = schema.find("type"); type != schema.end()) {
    for (const ordered_json& name : type->is_array() ? *type : ordered_json::array({*type})) {
      if (name.is_string()) types.insert(name.get<std::string>());
    }
  }
  for (const char* key : {"anyOf", "oneOf"}) {
    const auto choices = schema.find(key);
    if (choices == schema.end() || !choices->is_array()) continue;
    for (const ordered_json& choice : *choices) types.merge(types_of(choice));
  }
  const auto members = schema.find("enum");
  if (types.empty() && members != schema.end() && members->is_array()) {
    for (const ordered_json& member : *members) types.insert(type_of(member));
  }
  return types;
}

std::optional<ordered_json> parsed(std::string_view text) {
  text = text::trim(text);
  if (text == "True") return true;
  if (text == "False") return false;
  if (text == "None") return nullptr;
  try {
    return json_text::parse(text);
  } catch (const DataError&) {
    return std::nullopt;  // The text is the model's: it stays a string.
  }
}

}  // namespace

ordered_json properties_of(const ordered_json& tools, std::string_view name) {
  if (!tools.is_array()) return ordered_json::object();
  for (const ordered_json& tool : tools) {
    const ordered_json function = tool.is_object() ? tool.value("function", tool) : tool;
    if (!function.is_object() || function.value("name", ordered_json()) != name) continue;
    const ordered_json parameters = function.value("parameters", ordered_json());
    if (!parameters.is_object()) break;
    ordered_json properties = parameters.value("properties", ordered_json());
    if (properties.is_object()) return properties;
  }
  return ordered_json::object();
}

ordered_json typed_value(std::string_view text, const ordered_json& schema) {
  const std::set<std::string> types = types_of(schema);
  if (types.empty() || (types.size() == 1 && types.contains("string"))) return text;
  const std::optional<ordered_json> value = parsed(text);
  if (!value) return text;
  const std::string type = type_of(*value);
  const bool fits = types.contains(type) || (type == "integer" && types.contains("number"));
  // A parameter that is no string can only be left out by null.
  if (fits || (value->is_null() && !types.contains("string"))) return *value;
  return text;
}

}  // namespace heddle::data
