#pragma once

#include "base/named_enum.h"

namespace heddle::data {

/// Tokens of a conversation or a prompt/completion row that carry loss. Plain text always does.
enum class LossOn { kAssistant, kAll };
constexpr auto names_of(LossOn) { return spelled("assistant", "all"); }

/// Treatment of a row with more than max_length tokens. kSplit: several rows, text and tokens of
/// a language model only. kAuto: kSplit for plain text of a language model, kKeepStart for others.
enum class Truncation { kAuto, kDrop, kKeepStart, kKeepEnd, kSplit };
constexpr auto names_of(Truncation) {
  return spelled("auto", "drop", "keep_start", "keep_end", "split");
}

}  // namespace heddle::data
