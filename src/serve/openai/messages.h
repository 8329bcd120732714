#pragma once

#include "data/readers/row.h"
#include "serve/openai/fields.h"

namespace heddle::serve::openai {

/// A conversation of OpenAI's messages and tools, in the form that chat templates read. Contents
/// are texts or parts of text. Throws ApiError that names the field.
data::Row take_conversation(Fields& fields);

/// How a request lets the model use its tools.
struct ToolChoice {
  enum class Kind { kAuto, kNone, kRequired, kNamed };
  Kind kind = Kind::kAuto;
  std::string name;          ///< kNamed.
  bool has_parallel = true;  ///< Several calls in one answer.
};
/// `tools`: of the conversation, or null.
ToolChoice take_tool_choice(Fields& fields, const Json& tools);

}  // namespace heddle::serve::openai
