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

[[noreturn]] void fail(std::size_t turn, std::string_view reason) {
  throw_error<DataError>(
      "field 'messages[{}]': cannot tell which text of the rendering the assistant wrote: {}. Mark "
      "it in the chat template with {{% generation %}}, or train on all tokens (data.loss_on: all)",
      turn, reason);
}

/// The texts that a template shows in any case: what follows the thinking, or each part.
std::vector<std::string> visible_texts(const ordered_json& message) {
  std::vector<std::string> texts;
  const auto content = message.find("content");
  if (content == message.end()) return texts;
  if (content->is_string()) {
    std::string_view text = content->get_ref<const std::string&>();
    if (const auto end = text.rfind(kEndOfThinking); end != std::string_view::npos) {
      text.remove_prefix(end + kEndOfThinking.size());
    }
    texts.emplace_back(text::trim(text));
    return texts;
  }
  for (const ordered_json& part : *content) {
    texts.emplace_back(text::trim(part["text"].get_ref<const std::string&>()));
  }
  return texts;
}

bool holds_in_order(std::string_view text, const std::vector<std::string>& parts) {
  std::size_t at = 0;
  for (const std::string& part : parts) {
    at = text.find(part, at);
    if (at == std::string_view::npos) return false;
    at += part.size();
  }
  return true;
}

}  // namespace

struct AssistantSpans::Context {
  const ChatTemplate& chat_template;
  const ordered_json& messages;
  ChatTemplate::Conversation conversation;
  const std::string& full;

  std::string render(const ChatTemplate::Conversation& some, std::size_t count,
                     bool add_generation_prompt) const {
    return chat_template.render(some, count, add_generation_prompt).text;
  }
  /// A part of a conversation may be one that the template refuses (no user turn yet).
  std::optional<std::string> try_render(const ChatTemplate::Conversation& some, std::size_t count,
                                        bool add_generation_prompt) const {
    try {
      return render(some, count, add_generation_prompt);
    } catch (const DataError&) {
      return std::nullopt;
    }
  }
};

std::vector<TextSpan> AssistantSpans::find(const ordered_json& messages,
                                           const ChatTemplate::Options& options,
                                           const ChatTemplate::Rendered& full) const {
  const ChatTemplate& chat_template = chat_.chat_template();
  std::vector<std::size_t> turns;
  for (std::size_t i = 0; i < messages.size(); ++i) {
    if (messages[i]["role"] == "assistant") turns.push_back(i);
  }
  std::vector<TextSpan> spans;
  if (chat_template.has_generation_blocks()) {
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
  const Context context{chat_template, messages, chat_template.prepare(messages, options),
                        full.text};
  std::optional<Habit> habit;
  for (const std::size_t turn : turns) {
    TextSpan span;
    if (!find_by_prefix(context, turn, span)) {
      try {
        if (!habit) habit = learn(options);
      } catch (const DataError& error) {
        fail(turn, std::string("the template refuses a conversation of one question and answer: ") +
                       error.what());
      }
      span = find_by_marker(context, turn, *habit);
    }
    if (!spans.empty() && span.begin < spans.back().end) {
      fail(turn, "it overlaps with an earlier turn");
    }
    spans.push_back(span);
  }
  return spans;
}

std::string_view AssistantSpans::special_at_end(std::string_view text) const {
  text = text.substr(0, without_trailing_space(text));
  std::size_t longest = 0;
  for (const std::string& token : special_tokens_) {
    if (text.ends_with(token)) longest = std::max(longest, token.size());
  }
  return text.substr(text.size() - longest);
}

bool AssistantSpans::begins_with_special(std::string_view text) const {
  const std::size_t begin = std::min(text.find_first_not_of(" \t\r\n"), text.size());
  return std::any_of(special_tokens_.begin(), special_tokens_.end(), [&](const std::string& token) {
    return !token.empty() && text.substr(begin).starts_with(token);
  });
}

bool AssistantSpans::begins_with(std::string_view text, std::string_view& part) const {
  if (text.starts_with(part)) return true;
  const std::string_view token = special_at_end(part);
  if (token.empty()) return false;
  const std::string_view shorter =
      part.substr(0, static_cast<std::size_t>(token.data() - part.data()));
  if (!text.starts_with(shorter)) return false;
  // Another token in the place of the last one ends the turn differently.
  if (special_at_end(shorter).empty() && begins_with_special(text.substr(shorter.size()))) {
    return false;
  }
  part = shorter;
  return true;
}

bool AssistantSpans::find_by_prefix(const Context& context, std::size_t turn,
                                    TextSpan& span) const {
  const auto before = context.try_render(context.conversation, turn, true);
  if (!before || !context.full.starts_with(*before)) return false;
  const bool is_last = turn + 1 == context.messages.size();
  const auto with =
      is_last ? context.full : context.try_render(context.conversation, turn + 1, false);
  if (!with || !with->starts_with(*before)) return false;
  std::string_view upto = *with;
  if (!begins_with(context.full, upto) || upto.size() < before->size()) return false;
  span.begin = static_cast<std::int64_t>(before->size());
  span.end = std::max(span.begin, static_cast<std::int64_t>(without_trailing_space(upto)));
  return true;
}

AssistantSpans::Habit AssistantSpans::learn(const ChatTemplate::Options& options) const {
  const ordered_json user = {{"role", "user"}, {"content", "x"}};
  const ordered_json assistant = {{"role", "assistant"}, {"content", std::string(kMarker)}};
  ChatTemplate::Options prompting = options;
  const auto render = [&](const ordered_json& list, bool add_generation_prompt) {
    prompting.add_generation_prompt = add_generation_prompt;
    return chat_.chat_template().render(chat_.adapted(list), prompting).text;
  };
  std::string base = render(ordered_json::array({user}), false);
  const std::string prompted = render(ordered_json::array({user}), true);
  Habit habit;
  std::string_view question = base;
  if (!begins_with(prompted, question)) return habit;
  base.resize(question.size());
  habit.generation_prompt = prompted.substr(base.size());
  for (const auto& list :
       {ordered_json::array({user, assistant}), ordered_json::array({user, assistant, user})}) {
    const std::string text = render(list, false);
    const std::size_t at = text.find(kMarker);
    if (!text.starts_with(base) || at == std::string::npos || at <= base.size()) continue;
    habit.openings.push_back(text.substr(base.size(), at - base.size()));
    if (list.size() == 2) habit.closing = text.substr(at + kMarker.size());
  }
  std::sort(habit.openings.begin(), habit.openings.end(),
            [](const std::string& a, const std::string& b) { return a.size() > b.size(); });
  return habit;
}

TextSpan AssistantSpans::find_by_marker(const Context& context, std::size_t turn,
                                        const Habit& habit) const {
  const ordered_json& messages = context.messages;
  const std::string& full = context.full;
  if (full.find(kMarker) != std::string::npos) {
    fail(turn, "the conversation holds the characters that serve as a marker (U+E000, U+E001)");
  }

  // The turn with its content replaced and its thinking gone; tool calls stay, since later turns
  // may depend on them.
  ordered_json message = {{"role", "assistant"}, {"content", std::string(kMarker)}};
  for (const char* kept : {"tool_calls", "name"}) {
    if (messages[turn].contains(kept)) message[kept] = messages[turn][kept];
  }
  const ChatTemplate::Conversation marked =
      context.conversation.with(turn, chat_.adapted(ordered_json::array({message}))[0]);
  const auto whole = context.try_render(marked, messages.size(), false);
  if (!whole) fail(turn, "the template refuses the conversation with another text in this turn");
  const std::size_t at = whole->find(kMarker);
  if (at == std::string::npos) fail(turn, "the template does not show the content of this turn");
  if (whole->find(kMarker, at + 1) != std::string::npos) {
    fail(turn, "the template shows the content of this turn twice");
  }
  // Where the conversation cannot end with this turn (no user has spoken yet), the turn closes as
  // that of a short conversation.
  std::string end = habit.closing;
  if (const auto upto = context.try_render(marked, turn + 1, false)) {
    const std::size_t at_upto = upto->find(kMarker);
    if (at_upto == std::string::npos) {
      fail(turn, "the template does not show the content of this turn");
    }
    end = upto->substr(at_upto + kMarker.size());
  }

  // Where the turn starts: what precedes the marker must end with a known opening of a turn, and
  // all before that must be the same as in the conversation itself.
  const std::string_view before = std::string_view(*whole).substr(0, at);
  const auto known = std::find_if(habit.openings.begin(), habit.openings.end(),
                                  [&](const std::string& o) { return before.ends_with(o); });
  if (known == habit.openings.end()) {
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
  const std::string_view prompt = habit.generation_prompt;
  const std::size_t shared = std::min(common_prefix(prompt, std::string_view(*whole).substr(head)),
                                      common_prefix(prompt, body));
  if (shared == 0) fail(turn, "the turn does not begin as the generation prompt does");

  // Where it ends: after what closes the turn when it is the last one; the rest must be the same
  // as in the conversation itself.
  const std::string_view after = std::string_view(*whole).substr(at + kMarker.size());
  std::string_view closing = end;
  if (!begins_with(after, closing)) {
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
  if (!holds_in_order(said, visible_texts(messages[turn]))) {
    fail(turn, "the text found there does not hold the message's content");
  }
  return {static_cast<std::int64_t>(begin),
          static_cast<std::int64_t>(begin + without_trailing_space(said))};
}

}  // namespace heddle::data
