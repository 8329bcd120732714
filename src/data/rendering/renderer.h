#pragma once

#include <cstdint>
#include <memory>
#include <optional>
#include <string>
#include <vector>

#include <nlohmann/json.hpp>

#include "data/readers/row.h"
#include "data/rendering/row_policies.h"

namespace heddle::data {

class Chat;
class Tokenizer;

struct RenderOptions {
  std::int64_t max_length = 0;  ///< tokens of a row; 0 = no limit
  Truncation truncation = Truncation::kDrop;
  LossOn loss_on = LossOn::kAssistant;
  bool append_eos = true;  ///< after raw text and completions; chat templates end their own turns
  std::string chat_template;       ///< Jinja source; "" takes the tokenizer's
  std::string chat_template_name;  ///< where it is from, for messages
  /// An object handed to the template, e.g. {"enable_thinking": false}.
  nlohmann::ordered_json template_variables;
};

/// Bytes [begin, end) of a rendering that the assistant wrote, and the weight of their loss.
struct LossSpan {
  std::int64_t begin = 0;
  std::int64_t end = 0;
  double weight = 1;
};

/// The text of a row with the spans that carry loss, before tokenising.
struct RenderedText {
  std::string text;
  std::vector<LossSpan> spans;
};

/// The tokens of one row.
struct TokenizedRow {
  std::vector<std::int32_t> tokens;
  std::vector<std::int32_t> labels;        ///< shifted, -100 = none
  std::vector<float> weights;              ///< of labels
  std::vector<std::int64_t> text_lengths;  ///< A group's texts lie end to end; otherwise empty.
  double target = 0;
  std::int64_t loss_rows = 0;
  double loss_weight_sum = 0;

  /// kSplit: of any length still, see split().
  enum class Fate { kKept, kTruncated, kSplit, kDroppedLong, kDroppedNoLoss };
  Fate fate = Fate::kKept;
  std::int64_t full_length = 0;  ///< tokens before truncation

  bool kept() const {
    return fate == Fate::kKept || fate == Fate::kTruncated || fate == Fate::kSplit;
  }
};

/// Consecutive pieces of `length` tokens and a rest. The last label of a piece is the first token
/// of the next, so that each label of the row is in exactly one; pieces without any are left out.
std::vector<TokenizedRow> split(const TokenizedRow& row, std::int64_t length);

/// Turns rows into text, tokens and loss weights. Const and safe to use from several threads.
class Renderer {
 public:
  /// Throws DataError when the template cannot be parsed. A tokenizer without a template is
  /// accepted until a conversation comes.
  Renderer(const Tokenizer& tokenizer, RenderOptions options);
  ~Renderer();
  Renderer(const Renderer&) = delete;
  Renderer& operator=(const Renderer&) = delete;

  /// Text and loss spans of a conversation or text row. Throws DataError "field ...: reason", also
  /// when it cannot be told for certain what the assistant wrote.
  RenderedText render(const Row& row) const;
  /// Ids (equal to encoding the whole rendering) with labels and weights, cut to max_length by the
  /// policy.
  TokenizedRow tokenize(const Row& row) const;
  /// Tokens of a prompt that waits for the assistant's turn, not truncated. Conversations:
  /// assistant turns at the end are left out, and the generation prompt follows; with
  /// `continue_final_message` the last turn, the assistant's, is left open at the end of its text.
  std::vector<std::int32_t> tokenize_prompt(const Row& row,
                                            bool continue_final_message = false) const;
  /// Text with which a conversation of other roles' messages follows a turn of the assistant: from
  /// the end of that turn's text to where the assistant's next turn begins. It does not depend on
  /// the turns before, which stay as they are. Throws DataError where the template does not show
  /// the assistant's text.
  std::string render_reply(const Row& row) const;

  /// Everything a row's tokens depend on besides its content, for cache keys.
  std::string fingerprint() const;
  const RenderOptions& options() const { return options_; }

 private:
  /// The template for the row: "tool_use" for one with tools where there is one. DataError if none.
  const Chat& chat_of(const Row& row) const;
  nlohmann::ordered_json variables_of(const Row& row, const Chat& chat) const;
  RenderedText render_conversation(const Row& row) const;
  std::string render_open_turn(const Row& row) const;
  /// Each text cut to max_length by itself, laid end to end.
  TokenizedRow tokenize_group(const Row& row) const;

  const Tokenizer& tokenizer_;
  RenderOptions options_;
  std::unique_ptr<Chat> chat_;
  std::unique_ptr<Chat> tool_chat_;  ///< null: chat_ is for conversations with tools too
  std::vector<std::string> special_tokens_;
};

}  // namespace heddle::data
