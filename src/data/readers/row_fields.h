// Reading the fields of a row. Faults are a DataError that names the field.
#pragma once

#include <cstdint>
#include <string>
#include <vector>

#include <fmt/format.h>
#include <nlohmann/json.hpp>

#include "base/errors.h"

namespace heddle::data::row_fields {

using nlohmann::ordered_json;

template <class... Args>
[[noreturn]] void fail(const std::string& field, fmt::format_string<Args...> format,
                       Args&&... args) {
  throw_error<DataError>("field '{}': {}", field, fmt::format(format, std::forward<Args>(args)...));
}

/// The field, or null if it is absent or null.
const ordered_json* find(const ordered_json& object, const std::string& name);
/// The field; what is missing is named beside what the row has.
const ordered_json& require(const ordered_json& object, const std::string& name);
const std::string& as_string(const ordered_json& value, const std::string& field);
/// The value of a field's JSON text.
ordered_json parse_json_field(const std::string& source, const std::string& field);
/// Whether a value holds nothing: null, an empty text, or a list or object of nothing else, as
/// Arrow fills what a row does not have.
bool is_nothing(const ordered_json& value);
/// "" if the field is absent or null.
std::string optional_string(const ordered_json& object, const std::string& field);

}  // namespace heddle::data::row_fields
