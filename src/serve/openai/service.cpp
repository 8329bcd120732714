#include "serve/openai/service.h"

#include <random>

namespace heddle::serve::openai {

data::AnswerFormat Service::answer_format(bool has_tools) const {
  std::optional<std::string> source;
  if (has_tools) source = tokenizer->chat_template("tool_use");
  if (!source) source = tokenizer->chat_template();
  data::AnswerFormat format = data::answer_format_of(source.value_or(""));
  if (!has_tools) format.calls = data::CallSyntax::kNone;
  return format;
}

std::string random_name(std::size_t count) {
  static constexpr std::string_view kLetters =
      "0123456789ABCDEFGHIJKLMNOPQRSTUVWXYZabcdefghijklmnopqrstuvwxyz";
  std::random_device device;
  std::uniform_int_distribution<std::size_t> letter(0, kLetters.size() - 1);
  std::string name;
  while (name.size() < count) name += kLetters[letter(device)];
  return name;
}

}  // namespace heddle::serve::openai
