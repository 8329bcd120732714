#include "data/answer/answer_format.h"

namespace heddle::data {

AnswerFormat answer_format_of(std::string_view template_source) {
  const auto shows = [&](std::string_view text) {
    return template_source.find(text) != std::string_view::npos;
  };
  AnswerFormat format;
  format.has_reasoning = shows("</think>");
  if (shows("<tool_call>"))
    format.calls = shows("<function=") ? CallSyntax::kXml : CallSyntax::kJson;
  return format;
}

bool opens_reasoning(std::string_view prompt) {
  // Earlier turns may quote the tags.
  if (const std::size_t turn = prompt.rfind("<|im_start|>"); turn != std::string_view::npos)
    prompt.remove_prefix(turn);
  const std::size_t open = prompt.rfind("<think>"), close = prompt.rfind("</think>");
  return open != std::string_view::npos && (close == std::string_view::npos || close < open);
}

}  // namespace heddle::data
