// Rows of several texts that belong together.
#pragma once

#include <nlohmann/json.hpp>

#include "data/readers/row.h"

namespace heddle::data {

/// Fills row.texts, in the order of the shape. DataError names the field that does not fit.
void parse_group(const nlohmann::ordered_json& value, const FieldNames& fields,
                 const GroupShape& shape, Row& row);

}  // namespace heddle::data
