#pragma once

#include <string_view>

namespace heddle::data {

/// How an assistant writes calls of tools.
enum class CallSyntax {
  kNone,
  kXml,   ///< Qwen3.5, Qwen3.6: <tool_call><function=NAME><parameter=P>VALUE</parameter>...
  kJson,  ///< Qwen3, Qwen3-Next: <tool_call>{"name": ..., "arguments": {...}}</tool_call>
};

/// Parts of an assistant's text besides its content.
struct AnswerFormat {
  bool has_reasoning = false;  ///< <think>...</think> before the content.
  CallSyntax calls = CallSyntax::kNone;
};

/// The format that a chat template shows in its source.
AnswerFormat answer_format_of(std::string_view template_source);

/// True if a rendered prompt ends inside a block of thinking that its last turn has opened, so that
/// what the model writes begins with reasoning.
bool opens_reasoning(std::string_view prompt);

}  // namespace heddle::data
