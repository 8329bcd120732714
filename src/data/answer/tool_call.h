// One call of a tool as an assistant writes it between <tool_call> and </tool_call>.
#pragma once

#include <optional>
#include <string>
#include <string_view>

#include <nlohmann/json.hpp>

#include "data/answer/answer_format.h"

namespace heddle::data {

struct ToolCall {
  std::string name;
  std::string arguments;  ///< JSON text of an object.

  bool operator==(const ToolCall&) const = default;
};

/// The call in `body`, the text between the tags; nullopt for a text that is no whole call. Values
/// of XML parameters get the type that the schema of the tool in `tools` (a list of OpenAI's tools,
/// or null) names; strings are taken verbatim, as is a value that does not fit its type.
std::optional<ToolCall> parse_call(std::string_view body, CallSyntax syntax,
                                   const nlohmann::ordered_json& tools);

/// False if no text that begins with `body` can be a call: the tag was only mentioned.
bool can_begin_call(std::string_view body, CallSyntax syntax);

}  // namespace heddle::data
