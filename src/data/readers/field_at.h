#pragma once

#include <string>

#include <nlohmann/json.hpp>

#include "base/text.h"

namespace heddle::data {

/// The value of a row at "a" or, in nested objects, "a.b"; null where there is none. A column whose
/// name has a point goes before.
inline nlohmann::ordered_json field_at(const nlohmann::ordered_json& row,
                                       const std::string& field) {
  if (row.is_object() && row.contains(field)) return row.at(field);
  const nlohmann::ordered_json* value = &row;
  for (const std::string& part : text::split(field, '.')) {
    if (!value->is_object()) return nullptr;
    const auto found = value->find(part);
    if (found == value->end()) return nullptr;
    value = &*found;
  }
  return *value;
}

}  // namespace heddle::data
