#include "rl/dialogue.h"

#include <array>

#include "base/json.h"
#include "data/answer/answer_parser.h"
#include "data/json/json_text.h"
#include "data/readers/row.h"
#include "train/setup.h"

namespace heddle::rl {
namespace {

data::AnswerFormat format_of(const data::Renderer& renderer, const data::Tokenizer& tokenizer) {
  const std::string& given = renderer.options().chat_template;
  return data::answer_format_of(given.empty() ? tokenizer.chat_template().value_or("") : given);
}

/// Integers beyond 64 bits become their digits as text.
void spell_out(Json& value) {
  if (value.is_structured()) {
    for (Json& inner : value) spell_out(inner);
  } else if (const auto digits = data::json_text::big_integer(value)) {
    value = *digits;
  }
}

/// The policy may write anything that the reader of calls takes, which bounds how deep it is.
Json arguments_of(const data::ToolCall& call) {
  constexpr int kDepth = 256;
  Json arguments = data::json_text::parse(call.arguments, kDepth);
  spell_out(arguments);
  return arguments;
}

}  // namespace

Dialogue::Dialogue(const config::RunConfig& config, const data::Tokenizer& tokenizer)
    : tokenizer_(tokenizer),
      renderer_(tokenizer, train::dataset_options(config, train::DataPart::kTrain).rendering),
      format_(format_of(renderer_, tokenizer)) {
  reader_.task = data::Task::kEmbedding;  // nothing of a reply is learned
  reader_.format = data::RowFormat::kMessages;
}

Json Dialogue::message(const std::string& text, const std::string& before,
                       const Json& tools) const {
  if (!format_.has_reasoning && format_.calls == data::CallSyntax::kNone) return nullptr;
  data::AnswerParser parser(format_, data::opens_reasoning(before), tools);
  data::AnswerDelta parts = parser.push(text);
  parts += parser.finish();
  Json message = {{"role", "assistant"}, {"content", parts.content}};
  if (!parts.reasoning.empty()) message["reasoning_content"] = parts.reasoning;
  for (const data::ToolCall& call : parts.calls) {
    message["tool_calls"].push_back(
        {{"type", "function"},
         {"function", {{"name", call.name}, {"arguments", arguments_of(call)}}}});
  }
  return message;
}

std::string Dialogue::reply(const Json& messages, std::int32_t last) const {
  const data::Row row = data::parse_row(Json{{reader_.fields.messages, messages}}, reader_);
  std::string text = renderer_.render_reply(row);
  const std::string end = tokenizer_.decode(std::array{last});
  if (tokenizer_.is_special(last) && text.starts_with(end)) text.erase(0, end.size());
  return text;
}

}  // namespace heddle::rl
