// Rows that are conversations: messages, ShareGPT's turns, prompt and completion, instruction.
#pragma once

#include <string>

#include <nlohmann/json.hpp>

#include "data/readers/row.h"

namespace heddle::data {

/// Appends the messages of a list to row.messages, each with its weight; `field` names the list in
/// errors (DataError).
void append_messages(const nlohmann::ordered_json& list, const std::string& field,
                     const FieldNames& fields, Row& row);

/// Each of these fills messages, their weights and tools from the fields of its format; DataError
/// names the field that does not fit.
void parse_messages(const nlohmann::ordered_json& value, const FieldNames& fields, Row& row);
void parse_conversations(const nlohmann::ordered_json& value, const FieldNames& fields, Row& row);
/// Two texts make a row of text, two lists of messages a conversation.
void parse_prompt_completion(const nlohmann::ordered_json& value, const FieldNames& fields,
                             Row& row);
void parse_instruction(const nlohmann::ordered_json& value, const FieldNames& fields, Row& row);
/// Fills tools alone: a list, or a JSON text of one, as some data sets keep it; they may be
/// missing.
void parse_tools(const nlohmann::ordered_json& value, const FieldNames& fields, Row& row);

}  // namespace heddle::data
