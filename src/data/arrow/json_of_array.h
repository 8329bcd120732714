#pragma once

#include <cstdint>
#include <stdexcept>
#include <string>

namespace arrow {
class Array;
class Field;
}  // namespace arrow

namespace heddle::arrow_rows {

/// A value that JSON cannot have; the message begins with the column.
class NotJson : public std::runtime_error {
 public:
  using std::runtime_error::runtime_error;
};

/// Appends entry `index` of a column as JSON, with the numbers and texts that Python's
/// to_pylist() gives: lists, structs and maps of texts nested in any depth, dictionaries by their
/// values, decimals as numbers, dates and times as texts. `column` is what messages call it.
void append_json(const arrow::Array& array, std::int64_t index, const std::string& column,
                 std::string& out);

void append_json_string(std::string_view text, std::string& out);

}  // namespace heddle::arrow_rows
