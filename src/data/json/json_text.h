// JSON text of rows, read and written without changing a value.
#pragma once

#include <optional>
#include <string>
#include <string_view>

#include <nlohmann/json.hpp>

namespace heddle::data::json_text {

using nlohmann::ordered_json;

/// json::parse() with integers of any size: one beyond 64 bits keeps its digits (see big_integer).
/// Throws DataError, for bytes that are not UTF-8 with the way to convert them.
ordered_json parse(std::string_view text, int max_depth = 100);

/// The digits of an integer beyond 64 bits ("-9223372036854775809"); nullopt for any other value.
std::optional<std::string> big_integer(const ordered_json& value);

/// The JSON text of a value on one line, with integers of any size; bytes that are not UTF-8 become
/// U+FFFD.
std::string dump(const ordered_json& value);

/// The object `base` with the keys of `more` (an object, or null for none), whose values win; keys
/// stand in the order in which they come first. Takes linear time, where setting one key after
/// another looks for each by a scan.
ordered_json merged(ordered_json base, const ordered_json& more);

/// "string", "number", "array", ...: the JSON type, for messages.
const char* type_name(const ordered_json& value);

/// The number as a double, also of an integer beyond 64 bits; nullopt for what is no number.
std::optional<double> as_double(const ordered_json& value);

}  // namespace heddle::data::json_text
