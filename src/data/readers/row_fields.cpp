#include "data/readers/row_fields.h"

#include <algorithm>
#include <vector>

#include "base/text.h"
#include "data/json/json_text.h"

namespace heddle::data::row_fields {

const ordered_json* find(const ordered_json& object, const std::string& name) {
  const auto found = object.find(name);
  return found == object.end() || found->is_null() ? nullptr : &*found;
}

const ordered_json& require(const ordered_json& object, const std::string& name) {
  if (const ordered_json* value = find(object, name)) return *value;
  std::vector<std::string> keys;
  for (const auto& [key, unused] : object.items()) keys.push_back(key);
  const std::string nearest = text::nearest(name, keys);
  fail(name, "is missing; the row has {}{}",
       keys.empty() ? "no field" : "'" + text::list_some(keys, 6) + "'",
       nearest.empty() ? "" : fmt::format(" (did you mean '{}'? data.fields renames)", nearest));
}

const std::string& as_string(const ordered_json& value, const std::string& field) {
  if (!value.is_string())
    fail(field, "is a JSON {}, expected a string", json_text::type_name(value));
  return value.get_ref<const std::string&>();
}

ordered_json parse_json_field(const std::string& source, const std::string& field) {
  try {
    return json_text::parse(source);
  } catch (const DataError& error) {
    fail(field, "is JSON text that cannot be read: {}", error.what());
  }
}

bool is_nothing(const ordered_json& value) {
  if (value.is_string()) return value.get_ref<const std::string&>().empty();
  if (!value.is_structured()) return value.is_null();
  return std::all_of(value.begin(), value.end(), is_nothing);
}

std::string optional_string(const ordered_json& object, const std::string& field) {
  const ordered_json* value = find(object, field);
  return value == nullptr ? "" : as_string(*value, field);
}

}  // namespace heddle::data::row_fields
