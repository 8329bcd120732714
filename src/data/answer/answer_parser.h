#pragma once

#include <string>
#include <string_view>
#include <vector>

#include <nlohmann/json.hpp>

#include "data/answer/answer_format.h"
#include "data/answer/tool_call.h"

namespace heddle::data {

/// Addition of a piece of an assistant's text to its message.
struct AnswerDelta {
  std::string reasoning, content;
  std::vector<ToolCall> calls;

  bool is_empty() const { return reasoning.empty() && content.empty() && calls.empty(); }
  AnswerDelta& operator+=(const AnswerDelta& next);
};

/// Takes an assistant's text apart as it is generated. The sum of all deltas does not depend on
/// where the text is split.
///
/// Reasoning is given without the white space around it, and the line breaks between it and the
/// content are left out, as are those that the template puts before, between and after calls; all
/// other text stays as it is. A call appears when its end tag has come. A call that never ends or
/// cannot be read is content, with its tags.
class AnswerParser {
 public:
  /// `in_reasoning`: see opens_reasoning(). `tools`: OpenAI's list, for the types of values, or
  /// null.
  AnswerParser(const AnswerFormat& format, bool in_reasoning, nlohmann::ordered_json tools);

  AnswerDelta push(std::string_view text);
  AnswerDelta finish();

 private:
  enum class State { kStart, kReasoning, kAfterReasoning, kContent, kCall };

  /// One move within what is held; false if more text is needed. `is_last`: none will come.
  bool advance(AnswerDelta& delta, bool is_last);
  bool start(bool is_last);
  bool reason(AnswerDelta& delta, bool is_last);
  bool read_content(AnswerDelta& delta, bool is_last);
  bool read_call(AnswerDelta& delta, bool is_last);
  std::string take(std::size_t count);

  AnswerFormat format_;
  nlohmann::ordered_json tools_;
  State state_;
  std::string held_;            ///< Text whose meaning is not certain yet.
  std::size_t searched_ = 0;    ///< kCall: end tags before this byte of held_ do not end it.
  bool has_reasoned_ = false;   ///< Reasoning has begun with something other than white space.
  bool is_after_call_ = false;  ///< No content has come since the last call.
};

}  // namespace heddle::data
