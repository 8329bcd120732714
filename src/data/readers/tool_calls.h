// Calls of tools in the forms that data sets have, brought into that of OpenAI's messages.
#pragma once

#include <string>

#include <nlohmann/json.hpp>

namespace heddle::data {

/// Roles of turns that are a call ("function_call", "tool_call", ...) or a tool's answer
/// ("observation", "tool_response", ...) in ShareGPT, LLaMA-Factory and ms-swift.
bool is_call_role(const std::string& role);
bool is_answer_role(const std::string& role);

/// A list of calls [{"type": "function", "function": {"name", "arguments"}}] from a call or a list
/// of calls, also as JSON text. DataError names `field`.
nlohmann::ordered_json parse_calls(const nlohmann::ordered_json& value, const std::string& field);

/// Brings tool_calls and OpenAI's older function_call of a message into one list tool_calls, and
/// checks that arguments given as text are JSON objects. DataError names the call below `place`.
void normalize_calls(nlohmann::ordered_json& message, const std::string& place);

/// The arguments of a call: of its "function", or its own; null if it has none.
nlohmann::ordered_json* arguments_of(nlohmann::ordered_json& call);

}  // namespace heddle::data
