#include "data/rendering/turn_segments.h"

#include <algorithm>
#include <map>
#include <set>

#include "base/text.h"

namespace heddle::data::turn_segments {
namespace {

using nlohmann::ordered_json;

constexpr std::string_view kEndOfThinking = "</think>";

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

bool has_no_text(const ordered_json& message) {
  const std::vector<std::string> texts = visible_texts(message);
  return std::all_of(texts.begin(), texts.end(),
                     [](const std::string& text) { return text.empty(); });
}

std::size_t leading_space(std::string_view text) {
  return std::min(text.find_first_not_of(" \t\r\n"), text.size());
}

std::string_view segment(const ChatTemplate::Rendered& rendered, std::size_t message) {
  const auto& [begin, end] = rendered.message_spans[message];
  return std::string_view(rendered.text).substr(begin, end - begin);
}

/// Whether the turns follow each other and all text outside of them is the same.
bool differ_in_turns_alone(const std::vector<std::size_t>& turns,
                           const ChatTemplate::Rendered& full,
                           const ChatTemplate::Rendered& marked) {
  std::size_t at = 0, at_marked = 0;
  for (const std::size_t turn : turns) {
    const auto& [begin, end] = full.message_spans[turn];
    const auto& [begin_marked, end_marked] = marked.message_spans[turn];
    if (begin == end || begin_marked == end_marked || begin < at || begin_marked < at_marked) {
      return false;
    }
    const std::string_view between(full.text.data() + at, begin - at);
    if (between != std::string_view(marked.text.data() + at_marked, begin_marked - at_marked)) {
      return false;
    }
    at = end;
    at_marked = end_marked;
  }
  return std::string_view(full.text).substr(at) == std::string_view(marked.text).substr(at_marked);
}

std::string kind_of(const ordered_json& messages, std::size_t turn, bool is_before_question) {
  const ordered_json& message = messages[turn];
  std::string kind = is_before_question ? "question later" : "";
  const auto add = [&](std::string_view part) { kind.append("|").append(part); };
  add(turn == 0 ? "" : messages[turn - 1]["role"].get_ref<const std::string&>());
  add(turn + 1 == messages.size() ? "" : messages[turn + 1]["role"].get_ref<const std::string&>());
  const auto content = message.find("content");
  if (content == message.end()) {
    add("absent");
  } else if (!content->is_string()) {
    add("parts");
  } else {
    const std::string& text = content->get_ref<const std::string&>();
    add(text::trim(text).empty()                         ? "empty"
        : text.find(kEndOfThinking) != std::string::npos ? "thinking"
        : text.find_first_of(" \t\r\n") == 0             ? "space"
                                                         : "text");
  }
  // The keys that are there: reasoning by any name, tool_calls, name.
  for (const auto& [key, value] : message.items()) {
    if (key == "role" || key == "content") continue;
    add(key);
    if (value.empty() || (value.is_string() && text::trim(value.get<std::string>()).empty())) {
      add("empty");
    }
  }
  return kind;
}

}  // namespace

std::size_t common_prefix(std::string_view a, std::string_view b) {
  return static_cast<std::size_t>(
      std::mismatch(a.begin(), a.begin() + std::min(a.size(), b.size()), b.begin()).first -
      a.begin());
}

std::size_t without_trailing_space(std::string_view text) {
  const std::size_t last = text.find_last_not_of(" \t\r\n");
  return last == std::string_view::npos ? 0 : last + 1;
}

bool holds_visible_texts(std::string_view said, const ordered_json& message) {
  std::size_t at = 0;
  for (const std::string& part : visible_texts(message)) {
    at = said.find(part, at);
    if (at == std::string_view::npos) return false;
    at += part.size();
  }
  return true;
}

ordered_json marked_message(const ordered_json& message) {
  ordered_json marked = {{"role", "assistant"}, {"content", std::string(kMarker)}};
  for (const char* kept : {"tool_calls", "name"}) {
    if (message.contains(kept)) marked[kept] = message[kept];
  }
  return marked;
}

std::vector<std::optional<TextSpan>> spans_of(const ordered_json& messages,
                                              const std::vector<std::size_t>& turns,
                                              const ChatTemplate::Rendered& full,
                                              const ChatTemplate::Rendered& marked,
                                              std::string_view generation_prompt) {
  std::vector<std::optional<TextSpan>> spans;
  if (full.text.find(kMarker) != std::string::npos || generation_prompt.empty() ||
      !differ_in_turns_alone(turns, full, marked)) {
    return spans;
  }
  for (const std::size_t turn : turns) {
    std::optional<TextSpan>& span = spans.emplace_back();
    const std::string_view said = segment(full, turn), shown = segment(marked, turn);
    const std::size_t at = shown.find(kMarker);
    if (at == std::string_view::npos || shown.find(kMarker, at + 1) != std::string_view::npos) {
      continue;
    }
    const std::size_t shared = common_prefix(generation_prompt, said);
    const std::size_t shared_marked = common_prefix(generation_prompt, shown);
    // A content that goes on as the prompt does is not told from the prompt here.
    if (shared_marked == 0 || shared < shared_marked ||
        (shared == generation_prompt.size() && shared_marked < shared)) {
      continue;
    }
    std::string_view closing = shown.substr(at + kMarker.size());
    closing = closing.substr(0, without_trailing_space(closing));
    // Calls of tools follow a text after a line end, and the prompt where there is no text.
    if (has_no_text(messages[turn])) closing.remove_prefix(leading_space(closing));
    const std::string_view spoken =
        said.substr(0, std::max(shared_marked, without_trailing_space(said)));
    if (spoken.size() < shared_marked + closing.size() || !spoken.ends_with(closing) ||
        !holds_visible_texts(spoken.substr(shared_marked), messages[turn])) {
      continue;
    }
    const auto begin = static_cast<std::int64_t>(full.message_spans[turn].first);
    span = TextSpan{begin + static_cast<std::int64_t>(shared_marked),
                    begin + static_cast<std::int64_t>(spoken.size())};
  }
  return spans;
}

std::vector<std::size_t> samples_of(const ordered_json& messages,
                                    const std::vector<std::size_t>& turns) {
  std::size_t last_question = messages.size();
  while (last_question > 0 && messages[last_question - 1]["role"] != "user") --last_question;
  std::map<std::string, std::pair<std::size_t, std::size_t>> kinds;
  for (std::size_t i = 0; i < turns.size(); ++i) {
    const auto [entry, is_new] =
        kinds.try_emplace(kind_of(messages, turns[i], turns[i] < last_question), i, i);
    if (!is_new) entry->second.second = i;
  }
  std::set<std::size_t> samples;
  for (const auto& [kind, ends] : kinds) {
    samples.insert(ends.first);
    samples.insert(ends.second);
  }
  return {samples.begin(), samples.end()};
}

}  // namespace heddle::data::turn_segments
