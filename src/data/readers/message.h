// The turns of a conversation, each with the weight of its loss. Faults are a DataError that names
// the field below `place`.
#pragma once

#include <string>

#include <nlohmann/json.hpp>

#include "data/readers/row.h"

namespace heddle::data {

/// Appends the messages of a list, or of its JSON text, to row.messages; `field` names the list.
void append_messages(const nlohmann::ordered_json& list, const std::string& field,
                     const FieldNames& fields, Row& row);

/// Appends one message of `role` and `content`; `first` is where its list begins in row.messages.
void append_message(nlohmann::ordered_json message, const std::string& place,
                    const FieldNames& fields, std::size_t first, Row& row);

/// Appends a call of tools, to the assistant's turn before if it belongs to that: several calls, or
/// a text and calls, are one turn.
void append_calls(nlohmann::ordered_json calls, double weight, const std::string& place, Row& row,
                  std::size_t first);

/// The weight of a turn's loss, from `weight` or from the marks of other trainers, which are taken
/// out of the turn; NaN where it has none.
double take_weight(nlohmann::ordered_json& turn, const std::string& place, const FieldNames& fields,
                   bool is_assistant);

}  // namespace heddle::data
