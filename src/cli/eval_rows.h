#pragma once

#include <cstdint>
#include <string>
#include <vector>

#include <nlohmann/json.hpp>

#include "data/readers/row.h"
#include "data/rendering/renderer.h"
#include "data/tokenizer/tokenizer.h"

namespace heddle::cli {

struct EvalRowOptions {
  std::string input;
  std::string answer;     ///< field; "": `answer`, else what the row itself answers
  std::string group;      ///< field; "": one group
  bool raw = false;       ///< a text prompt is not a user's turn
  std::int64_t most = 0;  ///< the first so many rows; 0: all
  /// Names of input and answer where they were given.
  std::string input_key = "--input", answer_key = "--answer";
};

/// A row of which a model's answer is judged.
struct EvalCase {
  nlohmann::ordered_json value;  ///< as it stands in the file
  data::Row row;
  std::vector<std::int32_t> prompt;
  nlohmann::ordered_json truth;  ///< null: none
  std::vector<std::string> choices;
  std::string group;
  std::int64_t label = 0;  ///< of a classifier
  std::int64_t line = 0;
};

/// Reads rows with a prompt (`messages`, whose last answers are left out,
/// `prompt`, `text`, `input_ids`) and the right answer.
class EvalRows {
 public:
  /// The tokenizer outlives it. `reading`: the task, and a classifier's classes.
  EvalRows(const data::Tokenizer& tokenizer, const EvalRowOptions& options,
           const data::RenderOptions& rendering, const data::RowOptions& reading);

  /// Throws DataError, also where there is no row.
  std::vector<EvalCase> read() const;
  /// Throws DataError that begins with the row's file and line.
  [[noreturn]] void fail(const EvalCase& one, const std::string& reason) const;

  /// Throws DataError if the row has nothing to compare an answer with.
  void require_answer(const EvalCase& one) const;

  /// Tokens of the prompt and an answer. After a prompt that is plain text
  /// comes a space.
  std::vector<std::int32_t> with_answer(const EvalCase& one, const std::string& answer) const;
  /// Tokens with the labels that training would learn.
  data::TokenizedRow learned(const EvalCase& one) const;
  std::string truth_text(const EvalCase& one) const;
  /// The number of the right choice: the answer is its text, else its number from 0, else its
  /// letter.
  std::int64_t right_choice(const EvalCase& one) const;

 private:
  EvalCase parse(nlohmann::ordered_json value, std::int64_t line) const;
  nlohmann::ordered_json truth_of(const nlohmann::ordered_json& value, const data::Row& row) const;
  /// The last turn as the chat template writes it, without the token that ends it.
  std::string as_rendered(data::Row turns) const;
  /// A prompt that is plain text and the right answer, of which the answer alone is learned.
  data::TokenizedRow answered(const EvalCase& one) const;

  const data::Tokenizer& tokenizer_;
  const EvalRowOptions& options_;
  data::RowOptions reading_;
  bool has_template_;
  data::Renderer renderer_;
};

}  // namespace heddle::cli
