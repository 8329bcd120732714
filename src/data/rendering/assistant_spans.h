#pragma once

#include <cstdint>
#include <string>
#include <vector>

#include <nlohmann/json.hpp>

#include "data/jinja/chat_template.h"

namespace heddle::data {

/// Bytes [begin, end) of a rendering; begin == end where the assistant said nothing.
struct TextSpan {
  std::int64_t begin = 0;
  std::int64_t end = 0;
};

/// Finds what the assistant wrote in the rendering of a whole conversation: from behind the
/// generation prompt to the token that ends the turn, whitespace after it left out.
///
/// Three ways, the first that holds: the template's own {% generation %} blocks; prefixes (the
/// rendering of the messages before, with generation prompt, and of the messages up to and with the
/// turn must both begin the whole rendering); and, for templates that render a turn differently
/// once the conversation goes on (Qwen drops the thinking of earlier turns), a second rendering of
/// the whole conversation in which that turn's content is a marker. Every step is checked, and a
/// DataError says that it cannot be told, rather than a guess.
class AssistantSpans {
 public:
  /// `options` without add_generation_prompt; tools are given with each conversation.
  AssistantSpans(const ChatTemplate& chat_template, nlohmann::ordered_json variables);

  /// One span per message with role "assistant", in order. `full` is the rendering of all messages.
  std::vector<TextSpan> find(const nlohmann::ordered_json& messages,
                             const nlohmann::ordered_json& tools,
                             const ChatTemplate::Rendered& full) const;

 private:
  struct Conversation;
  /// How the template opens an assistant's turn, learnt from a conversation of one word each.
  struct Opening {
    std::string generation_prompt;
    std::vector<std::string>
        openings;  ///< text from the end of the user's turn to the content; longest first
  };

  bool find_by_prefix(const Conversation& conversation, std::size_t turn, TextSpan& span) const;
  TextSpan find_by_marker(const Conversation& conversation, std::size_t turn) const;
  Opening probe(const nlohmann::ordered_json& tools) const;

  const ChatTemplate& chat_template_;
  nlohmann::ordered_json variables_;
};

}  // namespace heddle::data
