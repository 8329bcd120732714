#pragma once

#include <cstdint>
#include <optional>
#include <string>
#include <vector>

#include <nlohmann/json.hpp>

#include "data/readers/row_format.h"

namespace heddle::data {

/// Purpose of a row.
enum class Task {
  kLanguageModel,
  kClassification,  ///< needs a `label`: an integer >= 0 or a class's name
  kRegression,      ///< needs a finite number `label`; also rewards
  kEmbedding,       ///< text or tokens only, nothing to predict
  kGroup,           ///< several texts that belong together: see GroupShape
};

/// Texts of a row that belong together (strings, lists of messages or of token ids), each a
/// sequence of its own, and the fields that hold them.
struct GroupShape {
  std::vector<std::string> texts = {};  ///< One text each.
  std::string more = {};                ///< Any number of further texts, maybe none; "": never any.
  /// The field with what the two texts follow and have in common: a string or a list of messages;
  /// `prompt`_ids with the texts' fields + "_ids" for token ids. A row without it has whole texts,
  /// of which the shared beginning is the prompt. "": the texts have no prompt.
  std::string prompt = {};
  bool learns = false;  ///< The texts carry labels: what the assistant writes after the prompt.
};

/// How rows are to be read.
struct RowOptions {
  RowFormat format = RowFormat::kAuto;
  FieldNames fields;
  Task task = Task::kLanguageModel;
  GroupShape group;  ///< kGroup.
  /// kClassification: how many classes there are; 0: not known, any number from 0 is one.
  std::int64_t classes = 0;
  /// kClassification: names of the classes, by number; empty: classes are numbers.
  std::vector<std::string> class_names;
};

/// A row in one of four normal forms: a conversation, a raw text (whose prompt may be set apart),
/// tokens, or several texts that belong together.
struct Row {
  enum class Form { kConversation, kText, kTokens, kGroup };

  Form form = Form::kText;
  RowFormat format = RowFormat::kText;
  Task task = Task::kLanguageModel;
  /// kConversation: list of objects with `role`. `content` is a string, a list of parts
  /// {"type": "text", "text": ...}, or absent. No key of a message is null.
  nlohmann::ordered_json messages;
  nlohmann::ordered_json tools;  ///< list, or null
  /// kConversation: the row's own variables of the template, an object, or null.
  nlohmann::ordered_json template_variables;
  std::vector<double> message_weights;  ///< one per message; NaN where the row says nothing
  std::size_t prompt_messages = 0;  ///< the first so many are a prompt, whose turns are not learnt
  std::string prompt;               ///< kText: what comes before `text` and carries no loss
  std::string text;                 ///< kText
  std::vector<std::int32_t> input_ids;  ///< kTokens, without padding
  std::vector<std::int32_t>
      labels;  ///< kTokens: unshifted, as long as input_ids, or empty = input_ids
  /// kTokens: whether each token carries loss under LossOn::kAssistant; empty: all do.
  std::vector<bool> loss_mask;
  /// kTokens: tokens of each sequence that the row holds end to end; empty: it is one.
  std::vector<std::int64_t> sequence_lengths;
  std::optional<double> target;  ///< class index or regression target
  std::vector<Row> texts;        ///< kGroup
};

/// Turns one parsed JSON value into a Row. Throws DataError "field 'x': reason" without file and
/// line, which the reader puts before it.
Row parse_row(const nlohmann::ordered_json& value, const RowOptions& options = {});

/// The sequences of a row, each as a row of its own: the row itself, but for rows of tokens with
/// sequence_lengths.
std::vector<Row> sequences(Row row);

}  // namespace heddle::data
