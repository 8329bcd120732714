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
using namespace turn_segments;

[[noreturn]] void fail(std::size_t turn, std::string_view reason) {
  throw_error<DataError>(
      "field 'messages[{}]': cannot tell which text of the rendering the assistant wrote: {}. Mark "
      "it in the chat template with {{% generation %}}, or train on all tokens (data.loss_on: all)",
      turn, reason);
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

struct AssistantSpans::Search {
  Context context;
  const ChatTemplate::Options& options;
  std::optional<Habit> habit;  ///< Learnt when first asked for.
};

std::vector<TextSpan> AssistantSpans::find(const ordered_json& messages,
                                           const ChatTemplate::Options& options,
                                           const ChatTemplate::Rendered& full,
                                           std::size_t many_turns) const {
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
  Search search{
      {chat_template, messages, chat_template.prepare(messages, options), full.text}, options, {}};
  if (turns.size() >= many_turns) {
    if (auto all = find_at_once(search, turns, full)) return *std::move(all);
  }
  for (const std::size_t turn : turns) spans.push_back(find_turn(search, turn));
  require_order(turns, spans);
  return spans;
}

void AssistantSpans::require_order(const std::vector<std::size_t>& turns,
                                   const std::vector<TextSpan>& spans) {
  for (std::size_t i = 1; i < spans.size(); ++i) {
    if (spans[i].begin < spans[i - 1].end) fail(turns[i], "it overlaps with an earlier turn");
  }
}

TextSpan AssistantSpans::find_turn(Search& search, std::size_t turn) const {
  TextSpan span;
  if (find_by_prefix(search.context, turn, span)) return span;
  try {
    if (!search.habit) search.habit = learn(search.options);
  } catch (const DataError& error) {
    fail(turn, std::string("the template refuses a conversation of one question and answer: ") +
                   error.what());
  }
  return find_by_marker(search.context, turn, *search.habit);
}

std::optional<std::vector<TextSpan>> AssistantSpans::find_at_once(
    Search& search, const std::vector<std::size_t>& turns,
    const ChatTemplate::Rendered& full) const {
  const ordered_json& messages = search.context.messages;
  ordered_json all_marked = messages;
  for (const std::size_t turn : turns) {
    all_marked[turn] = chat_.adapted(ordered_json::array({marked_message(messages[turn])}))[0];
  }
  std::vector<std::optional<TextSpan>> proposed;
  try {
    if (!search.habit) search.habit = learn(search.options);
    const ChatTemplate::Rendered marked =
        search.context.chat_template.render(all_marked, search.options);
    proposed = spans_of(messages, turns, full, marked, search.habit->generation_prompt);
  } catch (const DataError&) {
    return std::nullopt;
  }
  if (proposed.empty()) return std::nullopt;
  // The last turn may be followed by what ends any conversation: it is found by itself, as are
  // those that the renderings do not tell. One of each kind says whether the others are right.
  for (const std::size_t i : samples_of(messages, turns)) {
    const TextSpan found = find_turn(search, turns[i]);
    const bool is_last = i + 1 == turns.size();
    if (proposed[i] && !is_last && *proposed[i] != found) return std::nullopt;
    proposed[i] = found;
  }
  std::vector<TextSpan> spans;
  for (std::size_t i = 0; i < turns.size(); ++i) {
    spans.push_back(proposed[i] ? *proposed[i] : find_turn(search, turns[i]));
  }
  require_order(turns, spans);
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

  const ChatTemplate::Conversation marked = context.conversation.with(
      turn, chat_.adapted(ordered_json::array({marked_message(messages[turn])}))[0]);
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
  if (!holds_visible_texts(said, messages[turn])) {
    fail(turn, "the text found there does not hold the message's content");
  }
  return {static_cast<std::int64_t>(begin),
          static_cast<std::int64_t>(begin + without_trailing_space(said))};
}

}  // namespace heddle::data
