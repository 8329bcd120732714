#include "data/rendering/assistant_spans.h"

#include <algorithm>
#include <optional>
#include <string_view>
#include <utility>

#include "base/errors.h"
#include "base/text.h"

namespace heddle::data {
namespace {

using nlohmann::ordered_json;

/// Private-use characters, which no template treats specially and no ordinary text holds.
constexpr std::string_view kMarker = "\xee\x80\x80turn\xee\x80\x81";
constexpr std::string_view kEndOfThinking = "</think>";

std::size_t common_prefix(std::string_view a, std::string_view b) {
  return static_cast<std::size_t>(
      std::mismatch(a.begin(), a.begin() + std::min(a.size(), b.size()), b.begin()).first -
      a.begin());
}

std::size_t without_trailing_space(std::string_view text) {
  const std::size_t last = text.find_last_not_of(" \t\r\n");
  return last == std::string_view::npos ? 0 : last + 1;
}

ordered_json first_messages(const ordered_json& messages, std::size_t count) {
  ordered_json list = ordered_json::array();
  for (std::size_t i = 0; i < count; ++i) list.push_back(messages[i]);
  return list;
}

[[noreturn]] void fail(std::size_t turn, std::string_view reason) {
  throw_error<DataError>(
      "field 'messages[{}]': cannot tell which text of the rendering the assistant wrote: {}. Mark "
      "it in the chat template with {{% generation %}}, or train on all tokens (data.loss_on: all)",
      turn, reason);
}

/// The content that a template shows in any case: what follows the thinking.
std::string_view visible_content(const ordered_json& message) {
  std::string_view content = message["content"].get_ref<const std::string&>();
  if (const auto end = content.rfind(kEndOfThinking); end != std::string_view::npos) {
    content.remove_prefix(end + kEndOfThinking.size());
  }
  return text::trim(content);
}

}  // namespace

struct AssistantSpans::Conversation {
  const ChatTemplate& chat_template;
  const ordered_json& variables;
  const ordered_json& messages;
  const ordered_json& tools;
  const std::string& full;

  std::string render(const ordered_json& list, bool add_generation_prompt) const {
    ChatTemplate::Options options;
    options.tools = tools;
    options.add_generation_prompt = add_generation_prompt;
    options.variables = variables;
    return chat_template.render(list, options).text;
  }
  /// A part of a conversation may be one that the template refuses (no user turn yet).
  std::optional<std::string> try_render(const ordered_json& list,
                                        bool add_generation_prompt) const {
    try {
      return render(list, add_generation_prompt);
    } catch (const DataError&) {
      return std::nullopt;
    }
  }
};

AssistantSpans::AssistantSpans(const ChatTemplate& chat_template, ordered_json variables)
    : chat_template_(chat_template), variables_(std::move(variables)) {}

std::vector<TextSpan> AssistantSpans::find(const ordered_json& messages, const ordered_json& tools,
                                           const ChatTemplate::Rendered& full) const {
  std::vector<std::size_t> turns;
  for (std::size_t i = 0; i < messages.size(); ++i) {
    if (messages[i]["role"] == "assistant") turns.push_back(i);
  }
  std::vector<TextSpan> spans;
  if (chat_template_.has_generation_blocks()) {
    for (const auto& [begin, end] : full.generation_spans) {
      spans.push_back({static_cast<std::int64_t>(begin), static_cast<std::int64_t>(end)});
    }
    if (spans.size() != turns.size()) {
      throw_error<DataError>(
          "field 'messages': the chat template marks {} generated texts but there are {} assistant "
          "turns",
          spans.size(), turns.size());
    }
    return spans;
  }
  const Conversation conversation{chat_template_, variables_, messages, tools, full.text};
  for (const std::size_t turn : turns) {
    TextSpan span;
    if (!find_by_prefix(conversation, turn, span)) span = find_by_marker(conversation, turn);
    if (!spans.empty() && span.begin < spans.back().end) {
      fail(turn, "it overlaps with an earlier turn");
    }
    spans.push_back(span);
  }
  return spans;
}

bool AssistantSpans::find_by_prefix(const Conversation& conversation, std::size_t turn,
                                    TextSpan& span) const {
  const ordered_json& messages = conversation.messages;
  const auto before = conversation.try_render(first_messages(messages, turn), true);
  if (!before || !conversation.full.starts_with(*before)) return false;
  const bool is_last = turn + 1 == messages.size();
  const auto with = is_last ? conversation.full
                            : conversation.try_render(first_messages(messages, turn + 1), false);
  if (!with || !with->starts_with(*before) || !conversation.full.starts_with(*with)) return false;
  span.begin = static_cast<std::int64_t>(before->size());
  span.end = std::max(span.begin, static_cast<std::int64_t>(without_trailing_space(*with)));
  return true;
}

AssistantSpans::Opening AssistantSpans::probe(const ordered_json& tools) const {
  const std::string nothing;
  const ordered_json user = {{"role", "user"}, {"content", "x"}};
  const ordered_json assistant = {{"role", "assistant"}, {"content", std::string(kMarker)}};
  const Conversation words{chat_template_, variables_, user, tools, nothing};
  const std::string base = words.render(ordered_json::array({user}), false);
  const std::string prompted = words.render(ordered_json::array({user}), true);
  Opening opening;
  if (!prompted.starts_with(base)) return opening;
  opening.generation_prompt = prompted.substr(base.size());
  for (const auto& list :
       {ordered_json::array({user, assistant}), ordered_json::array({user, assistant, user})}) {
    const std::string text = words.render(list, false);
    const std::size_t at = text.find(kMarker);
    if (!text.starts_with(base) || at == std::string::npos || at <= base.size()) continue;
    opening.openings.push_back(text.substr(base.size(), at - base.size()));
  }
  std::sort(opening.openings.begin(), opening.openings.end(),
            [](const std::string& a, const std::string& b) { return a.size() > b.size(); });
  return opening;
}

TextSpan AssistantSpans::find_by_marker(const Conversation& conversation, std::size_t turn) const {
  const ordered_json& messages = conversation.messages;
  const std::string& full = conversation.full;
  if (full.find(kMarker) != std::string::npos) {
    fail(turn, "the conversation holds the characters that serve as a marker (U+E000, U+E001)");
  }
  const auto refuse = [&](const DataError& error) {
    fail(turn, std::string("the template refuses a marked conversation: ") + error.what());
  };

  // The turn with its content replaced and its thinking gone; tool calls stay, since later turns
  // may depend on them.
  ordered_json marked = messages;
  ordered_json message = {{"role", "assistant"}, {"content", std::string(kMarker)}};
  for (const char* kept : {"tool_calls", "name"}) {
    if (messages[turn].contains(kept)) message[kept] = messages[turn][kept];
  }
  marked[turn] = message;

  std::string whole, upto;
  Opening opening;
  try {
    whole = conversation.render(marked, false);
    upto = conversation.render(first_messages(marked, turn + 1), false);
    opening = probe(conversation.tools);
  } catch (const DataError& error) {
    refuse(error);
  }
  const std::size_t at = whole.find(kMarker), at_upto = upto.find(kMarker);
  if (at == std::string::npos || at_upto == std::string::npos) {
    fail(turn, "the template does not show the content of this turn");
  }
  if (whole.find(kMarker, at + 1) != std::string::npos) {
    fail(turn, "the template shows the content of this turn twice");
  }

  // Where the turn starts: what precedes the marker must end with a known opening of a turn, and
  // all before that must be the same as in the conversation itself.
  const std::string_view before = std::string_view(whole).substr(0, at);
  const auto known = std::find_if(opening.openings.begin(), opening.openings.end(),
                                  [&](const std::string& o) { return before.ends_with(o); });
  if (known == opening.openings.end()) {
    fail(turn, "the turn does not open as the template's turns do");
  }
  const std::size_t head = before.size() - known->size();
  if (std::string_view(full).substr(0, head) != before.substr(0, head)) {
    fail(turn, "earlier turns are rendered differently depending on it");
  }
  // The prompt is what both the template puts before a content and generation starts from. The
  // marker differs from any text in its first byte, so that the content's own first characters are
  // never taken for the prompt.
  const std::string_view body = std::string_view(full).substr(head);
  const std::string_view prompt = opening.generation_prompt;
  const std::size_t shared = std::min(common_prefix(prompt, std::string_view(whole).substr(head)),
                                      common_prefix(prompt, body));
  if (shared == 0) fail(turn, "the turn does not begin as the generation prompt does");

  // Where it ends: behind what closes the turn when it is the last one; the rest must be the same
  // as in the conversation itself.
  const std::string_view after = std::string_view(whole).substr(at + kMarker.size());
  const std::string_view closing = std::string_view(upto).substr(at_upto + kMarker.size());
  if (!after.starts_with(closing)) {
    fail(turn, "the turn closes differently when the conversation goes on");
  }
  const std::string_view rest = after.substr(closing.size());
  const std::size_t begin = head + shared;
  if (!full.ends_with(rest) || full.size() - rest.size() < begin) {
    fail(turn, "later turns are rendered differently depending on it");
  }
  const std::string_view said =
      std::string_view(full).substr(begin, full.size() - rest.size() - begin);
  const std::size_t closing_end = closing.size() - without_trailing_space(closing);
  if (said.size() < closing_end ||
      said.substr(said.size() - closing_end) != closing.substr(closing.size() - closing_end)) {
    fail(turn, "the turn closes differently depending on its content");
  }
  if (said.find(visible_content(messages[turn])) == std::string_view::npos) {
    fail(turn, "the text found there does not hold the message's content");
  }
  return {static_cast<std::int64_t>(begin),
          static_cast<std::int64_t>(begin + without_trailing_space(said))};
}

}  // namespace heddle::data
