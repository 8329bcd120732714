// Rows that are conversations: messages, ShareGPT's turns, prompt and completion, instruction.
#pragma once

#include <string>

#include <nlohmann/json.hpp>

#include "data/readers/row.h"

namespace heddle::data {

/// Each fills messages, their weights and tools from the fields of its format; DataError names the
/// field that does not fit.
void parse_messages(const nlohmann::ordered_json& value, const FieldNames& fields, Row& row);
void parse_conversations(const nlohmann::ordered_json& value, const FieldNames& fields, Row& row);
/// Two texts make a row of text, two lists of messages a conversation.
void parse_prompt_completion(const nlohmann::ordered_json& value, const FieldNames& fields,
                             Row& row);
void parse_instruction(const nlohmann::ordered_json& value, const FieldNames& fields, Row& row);
/// Fills tools alone: a list, or a JSON text of one, as some data sets keep it; they may be
/// missing.
void parse_tools(const nlohmann::ordered_json& value, const FieldNames& fields, Row& row);

/// Whether apply_chat_template has an argument of this name, which no variable of a template has.
bool is_template_argument(const std::string& name);
/// The row's own variables of the chat template, `chat_template_kwargs`.
void parse_template_variables(const nlohmann::ordered_json& value, Row& row);

}  // namespace heddle::data
