// Texts that end or begin within a turn of the assistant, found by a mark in its place.
#include <string>
#include <string_view>
#include <utility>

#include "base/errors.h"
#include "data/rendering/chat.h"
#include "data/rendering/renderer.h"

namespace heddle::data {
namespace {

using nlohmann::ordered_json;

/// Characters for private use, which no template treats in its own way.
constexpr const char* kMark = "\xee\x80\x80open\xee\x80\x81";

}  // namespace

std::string Renderer::render_open_turn(const Row& row) const {
  const std::string place = fmt::format("messages[{}]", row.messages.size() - 1);
  if (row.messages.back()["role"] != "assistant") {
    throw_error<DataError>("field '{}': is no turn of the assistant that could be continued",
                           place);
  }
  const Chat& chat = chat_of(row);
  ordered_json messages = chat.adapted(row.messages);
  ordered_json* content =
      messages.back().contains("content") ? &messages.back()["content"] : nullptr;
  if (content != nullptr && content->is_array() && !content->empty()) {
    content = &content->back()["text"];
  }
  if (content == nullptr || !content->is_string()) {
    throw_error<DataError>("field '{}.content': is missing; there is no text to continue", place);
  }
  // A template that trims contents takes the space after the mark, and so that before it too.
  const std::string mark = kMark, spaced = mark + " ";
  content->get_ref<std::string&>() += spaced;
  ChatTemplate::Options options;
  options.tools = row.tools;
  options.variables = variables_of(row, chat);
  const std::string text = chat.chat_template().render(messages, options).text;
  const std::size_t at = text.rfind(mark);
  if (at == std::string::npos) {
    throw_error<DataError>("field '{}.content': the chat template does not show it", place);
  }
  const bool is_trimmed = text.compare(at, spaced.size(), spaced) != 0;
  const std::string_view open = std::string_view(text).substr(0, at);
  return std::string(is_trimmed ? open.substr(0, open.find_last_not_of(" \t\r\n") + 1) : open);
}

std::string Renderer::render_reply(const Row& row) const {
  const Chat& chat = chat_of(row);
  for (std::size_t i = 0; i < row.messages.size(); ++i) {
    if (row.messages[i]["role"] == "assistant") {
      throw_error<DataError>("field 'messages[{}]': the assistant's turns are the policy's", i);
    }
  }
  // Templates ask for a user's message in front.
  ordered_json messages = {{{"role", "user"}, {"content", "?"}},
                           {{"role", "assistant"}, {"content", kMark}}};
  for (const ordered_json& message : row.messages) messages.push_back(message);
  ChatTemplate::Options options;
  options.tools = row.tools;
  options.variables = variables_of(row, chat);
  options.add_generation_prompt = true;
  const std::string text = chat.chat_template().render(chat.adapted(messages), options).text;
  const std::size_t at = text.find(kMark);
  if (at == std::string::npos)
    throw DataError("the chat template does not show what the assistant wrote");
  return text.substr(at + std::string_view(kMark).size());
}

}  // namespace heddle::data
