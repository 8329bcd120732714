#include "data/answer/answer_parser.h"

#include <algorithm>
#include <utility>

namespace heddle::data {
namespace {

constexpr std::string_view kThink = "<think>", kThinkEnd = "</think>";
constexpr std::string_view kCall = "<tool_call>", kCallEnd = "</tool_call>";
constexpr const char* kSpace = " \t\r\n";

/// Where the white space that ends text[0, end) begins.
std::size_t space_before(std::string_view text, std::size_t end) {
  const std::size_t last =
      end == 0 ? std::string_view::npos : text.find_last_not_of(kSpace, end - 1);
  return last == std::string_view::npos ? 0 : last + 1;
}

/// Where the longest end of `text` that begins `word` begins; text.size() if none does.
std::size_t begun(std::string_view text, std::string_view word) {
  for (std::size_t n = std::min(word.size() - 1, text.size()); n > 0; --n) {
    if (text.ends_with(word.substr(0, n))) return text.size() - n;
  }
  return text.size();
}

}  // namespace

AnswerDelta& AnswerDelta::operator+=(const AnswerDelta& next) {
  reasoning += next.reasoning;
  content += next.content;
  calls.insert(calls.end(), next.calls.begin(), next.calls.end());
  return *this;
}

AnswerParser::AnswerParser(const AnswerFormat& format, bool in_reasoning,
                           nlohmann::ordered_json tools)
    : format_(format),
      tools_(std::move(tools)),
      state_(!format.has_reasoning ? State::kContent
             : in_reasoning        ? State::kReasoning
                                   : State::kStart) {}

AnswerDelta AnswerParser::push(std::string_view text) {
  held_ += text;
  AnswerDelta delta;
  while (advance(delta, false)) {
  }
  return delta;
}

AnswerDelta AnswerParser::finish() {
  AnswerDelta delta;
  while (advance(delta, true)) {
  }
  return delta;
}

bool AnswerParser::advance(AnswerDelta& delta, bool is_last) {
  switch (state_) {
    case State::kStart:
      return start(is_last);
    case State::kReasoning:
      return reason(delta, is_last);
    case State::kAfterReasoning: {
      held_.erase(0, std::min(held_.find_first_not_of('\n'), held_.size()));
      if (held_.empty()) return false;
      state_ = State::kContent;
      return true;
    }
    case State::kContent:
      return read_content(delta, is_last);
    case State::kCall:
      return read_call(delta, is_last);
  }
  return false;
}

std::string AnswerParser::take(std::size_t count) {
  std::string text = held_.substr(0, count);
  held_.erase(0, count);
  return text;
}

/// Decides whether the text begins with thinking.
bool AnswerParser::start(bool is_last) {
  const std::size_t first = std::min(held_.find_first_not_of(kSpace), held_.size());
  const std::string_view text = std::string_view(held_).substr(first);
  if (text.starts_with(kThink)) {
    take(first + kThink.size());
    state_ = State::kReasoning;
    return true;
  }
  if (!is_last && kThink.starts_with(text)) return false;
  state_ = State::kContent;
  return true;
}

bool AnswerParser::reason(AnswerDelta& delta, bool is_last) {
  if (!has_reasoned_) {
    take(std::min(held_.find_first_not_of(kSpace), held_.size()));
    if (held_.empty()) return false;
  }
  const std::size_t end = held_.find(kThinkEnd);
  if (end != std::string::npos) {
    delta.reasoning += take(space_before(held_, end));
    take(held_.find(kThinkEnd) + kThinkEnd.size());
    state_ = State::kAfterReasoning;
    return true;
  }
  const std::size_t certain = space_before(held_, is_last ? held_.size() : begun(held_, kThinkEnd));
  has_reasoned_ |= certain > 0;
  delta.reasoning += take(certain);
  return false;
}

bool AnswerParser::read_content(AnswerDelta& delta, bool is_last) {
  if (format_.calls == CallSyntax::kNone) {
    delta.content += take(held_.size());
    return false;
  }
  const std::size_t call = held_.find(kCall);
  std::size_t certain = call;
  if (call == std::string::npos) certain = is_last ? held_.size() : begun(held_, kCall);
  // White space counts only when text follows it: before a call it is the template's.
  if (call != std::string::npos || !is_last || is_after_call_)
    certain = space_before(held_, certain);
  if (certain > 0) is_after_call_ = false;
  delta.content += take(certain);
  if (call == std::string::npos) return false;
  state_ = State::kCall;
  searched_ = 0;
  return true;
}

/// held_ begins with white space and the tag of a call.
bool AnswerParser::read_call(AnswerDelta& delta, bool is_last) {
  const std::size_t begin = held_.find(kCall) + kCall.size();
  const auto give_up = [&](std::size_t count) {
    delta.content += take(count);
    is_after_call_ = false;
    state_ = State::kContent;
    return true;
  };
  if (!can_begin_call(std::string_view(held_).substr(begin), format_.calls)) return give_up(begin);
  for (std::size_t end = held_.find(kCallEnd, std::max(searched_, begin)); end != std::string::npos;
       end = held_.find(kCallEnd, end + 1)) {
    auto parsed =
        parse_call(std::string_view(held_).substr(begin, end - begin), format_.calls, tools_);
    if (!parsed) {
      searched_ = end + 1;
      continue;
    }
    delta.calls.push_back(std::move(*parsed));
    take(end + kCallEnd.size());
    is_after_call_ = true;
    state_ = State::kContent;
    return true;
  }
  if (is_last) return give_up(begin);
  // The next text may complete a tag that ends what is held.
  if (held_.size() > kCallEnd.size())
    searched_ = std::max(searched_, held_.size() - kCallEnd.size() + 1);
  return false;
}

}  // namespace heddle::data
