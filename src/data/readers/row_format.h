#pragma once

#include <string>

#include "base/named_enum.h"

namespace heddle::data {

/// How a JSON object is to be understood. kAuto decides row by row from the fields that are there,
/// in the order of this list.
enum class RowFormat {
  kAuto,
  kTokens,         ///< `input_ids`, optional `labels`
  kMessages,       ///< `messages`, optional `tools`
  kConversations,  ///< ShareGPT: `conversations` of `from` and `value`, optional `system`, `tools`
  kPromptCompletion,  ///< `prompt` and `completion`: two strings or two lists of messages
  kInstruction,       ///< Alpaca: `instruction`, `input`, `output`, optional `system`, `history`
  kText,              ///< `text`
  kPairs,             ///< several texts, for example `query` and `positive`: see GroupShape
};
constexpr auto names_of(RowFormat) {
  return spelled("auto", "tokens", "messages", "sharegpt", "prompt_completion", "alpaca", "text",
                 "pairs");
}

/// Treatment of a row that cannot be read.
enum class BadRowPolicy { kError, kSkip };
constexpr auto names_of(BadRowPolicy) { return spelled("error", "skip"); }

/// The names of the fields in a data file.
struct FieldNames {
  std::string messages = "messages";
  std::string tools = "tools";
  std::string weight = "weight";  ///< in a message
  std::string conversations = "conversations";
  std::string from = "from";    ///< in a conversation's turn
  std::string value = "value";  ///< in a conversation's turn
  std::string prompt = "prompt";
  std::string completion = "completion";
  std::string instruction = "instruction";
  std::string input = "input";
  std::string output = "output";
  std::string system = "system";
  std::string history = "history";
  std::string text = "text";
  std::string input_ids = "input_ids";
  std::string labels = "labels";
  std::string label = "label";
};

}  // namespace heddle::data
