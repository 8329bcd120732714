// Rows that were tokenised beforehand.
#pragma once

#include <string>
#include <vector>

#include <nlohmann/json.hpp>

#include "data/readers/row.h"

namespace heddle::data {

/// A list of token ids; DataError names the entry of `field` that is none. `allow_ignored`: -100 is
/// taken too.
std::vector<std::int32_t> parse_ids(const nlohmann::ordered_json& list, const std::string& field,
                                    bool allow_ignored);

/// Fills ids, labels, loss mask and sequences. Padding, which attention_mask marks with 0 at the
/// ends, is left out with all that belongs to it.
void parse_tokens(const nlohmann::ordered_json& value, const FieldNames& fields, Row& row);

}  // namespace heddle::data
