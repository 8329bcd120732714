#pragma once

#include <cstddef>
#include <optional>
#include <string>
#include <vector>

#include <nlohmann/json.hpp>

#include "data/rendering/chat.h"
#include "data/rendering/turn_segments.h"

namespace heddle::data {

/// Finds what the assistant wrote in the rendering of a whole conversation: from after the
/// generation prompt to the token that ends the turn, whitespace after it left out.
///
/// Three ways, the first that holds: the template's own {% generation %} blocks; prefixes (the
/// rendering of the messages before, with generation prompt, and of the messages up to and with the
/// turn must both begin the whole rendering); and, for templates that render a turn differently
/// once the conversation goes on (Qwen drops the thinking of earlier turns) or that refuse a part
/// of the conversation, a second rendering of the whole conversation in which that turn's content
/// is a marker. A special token that the template puts at the end of any conversation does not
/// count as a turn's. Each of the last two ways renders the conversation for each turn: of many
/// turns, all are told from one rendering with every content a marker, and some of each kind are
/// found by themselves to check that. Every step is checked, and a DataError says that it cannot be
/// told, rather than a guess.
class AssistantSpans {
 public:
  /// `special_tokens`: the texts of the tokenizer's special tokens.
  AssistantSpans(const Chat& chat, const std::vector<std::string>& special_tokens)
      : chat_(chat), special_tokens_(special_tokens) {}

  /// Fewer turns are rendered one by one in less time than the samples take.
  static constexpr std::size_t kManyTurns = 32;

  /// One span per message with role "assistant", in order. `messages` are adapted to the template,
  /// `full` is the rendering of all of them under `options`. From `many_turns` on they are found at
  /// once, where that can be.
  std::vector<TextSpan> find(const nlohmann::ordered_json& messages,
                             const ChatTemplate::Options& options,
                             const ChatTemplate::Rendered& full,
                             std::size_t many_turns = kManyTurns) const;

 private:
  struct Context;
  struct Search;
  /// How the template writes an assistant's turn, learnt from a conversation of one word each.
  struct Habit {
    std::string generation_prompt;
    std::vector<std::string>
        openings;         ///< text from the end of the user's turn to the content; longest first
    std::string closing;  ///< text after the content of the last turn
  };

  static void require_order(const std::vector<std::size_t>& turns,
                            const std::vector<TextSpan>& spans);
  TextSpan find_turn(Search& search, std::size_t turn) const;
  /// Nothing where the template does not let all turns be told at once.
  std::optional<std::vector<TextSpan>> find_at_once(Search& search,
                                                    const std::vector<std::size_t>& turns,
                                                    const ChatTemplate::Rendered& full) const;
  bool find_by_prefix(const Context& context, std::size_t turn, TextSpan& span) const;
  TextSpan find_by_marker(const Context& context, std::size_t turn, const Habit& habit) const;
  Habit learn(const ChatTemplate::Options& options) const;
  /// Whether `text` begins with `part`, or with `part` less a special token at its end, which then
  /// stands at the end of conversations only. Shortens `part`.
  bool begins_with(std::string_view text, std::string_view& part) const;
  /// The special token at the end, or at the begin, of a text; white space aside. "" if none.
  std::string_view special_at_end(std::string_view text) const;
  bool begins_with_special(std::string_view text) const;

  const Chat& chat_;
  const std::vector<std::string>& special_tokens_;
};

}  // namespace heddle::data
