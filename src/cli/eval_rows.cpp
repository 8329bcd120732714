#include "cli/eval_rows.h"

#include <algorithm>

#include "base/errors.h"
#include "base/quote.h"
#include "data/batch.h"
#include "data/json/json_text.h"
#include "data/readers/field_at.h"
#include "data/readers/jsonl_reader.h"

namespace heddle::cli {
namespace {

using Json = nlohmann::ordered_json;

std::string text_of(const Json& value) {
  return value.is_string() ? value.get<std::string>() : data::json_text::dump(value);
}

/// A column that is null has no value in this row, as tables fill it.
Json without_nulls(const Json& value) {
  Json kept = Json::object();
  for (const auto& [name, field] : value.items())
    if (!field.is_null()) kept[name] = field;
  return kept;
}

/// Content of a turn, a text or parts of one, as text; null for parts of other kinds.
Json text_of_content(const Json& content) {
  if (!content.is_array()) return content;
  std::string text;
  for (const Json& part : content) {
    if (!part.is_object() || !part.value("text", Json()).is_string()) return nullptr;
    text += part["text"].get<std::string>();
  }
  return text;
}

bool is_open(const data::Row& row) {
  return row.messages.empty() || row.messages.back().value("role", std::string()) != "assistant";
}

/// A prompt of its own, a text or messages, as fields that the readers of rows
/// know.
void rename_prompt(Json& value, bool is_user_turn) {
  const auto prompt = value.find("prompt");
  if (prompt == value.end() || value.contains("messages") || value.contains("completion")) return;
  if (prompt->is_array()) {
    value["messages"] = *prompt;
  } else if (prompt->is_string() && is_user_turn) {
    value["messages"] = Json::array({{{"role", "user"}, {"content", *prompt}}});
  } else if (prompt->is_string()) {
    value["text"] = *prompt;
  }
}

}  // namespace

EvalRows::EvalRows(const data::Tokenizer& tokenizer, const EvalRowOptions& options,
                   const data::RenderOptions& rendering, const data::RowOptions& reading)
    : tokenizer_(tokenizer),
      options_(options),
      reading_(reading),
      has_template_(tokenizer.chat_template().has_value()),
      renderer_(tokenizer, rendering) {}

void EvalRows::fail(const EvalCase& one, const std::string& reason) const {
  throw_error<DataError>("{}:{}: {}", options_.input, one.line, reason);
}

void EvalRows::require_answer(const EvalCase& one) const {
  if (!one.truth.is_null()) return;
  fail(one, fmt::format("has no answer to compare with: expected 'answer', another field that {} "
                        "names, or a last turn of the assistant",
                        options_.answer_key));
}

std::vector<EvalCase> EvalRows::read() const {
  const std::filesystem::path file = options_.input == "-" ? "/dev/stdin" : options_.input;
  const auto records = data::RecordReader::open(file);
  std::vector<EvalCase> cases;
  std::string line;
  while ((options_.most == 0 || std::ssize(cases) < options_.most) && records->next(line)) {
    const data::Place place{records->name(), records->line()};
    Json value = data::parse_json_line(line, place, {});
    try {
      cases.push_back(parse(std::move(value), place.line));
    } catch (const DataError& error) {
      throw_error<DataError>("{}:{}: {}", place.file, place.line, error.what());
    }
  }
  if (cases.empty())
    throw_error<DataError>("{}: {}: no row; there is nothing to judge", options_.input_key,
                           options_.input);
  return cases;
}

EvalCase EvalRows::parse(Json value, std::int64_t line) const {
  EvalCase one;
  one.line = line;
  Json readable = without_nulls(value);
  rename_prompt(readable, has_template_ && !options_.raw);
  one.row = data::parse_row(readable, reading_);
  if (reading_.task == data::Task::kClassification) {
    one.prompt = renderer_.tokenize(one.row).tokens;
    one.label = static_cast<std::int64_t>(one.row.target.value_or(0));
  } else {
    one.prompt = renderer_.tokenize_prompt(one.row);
    one.truth = truth_of(readable, one.row);
  }
  if (one.prompt.empty()) throw DataError("the prompt has no token");
  if (const auto choices = readable.find("choices"); choices != readable.end()) {
    if (!choices->is_array() || choices->empty())
      throw DataError("field 'choices': expected a list of texts");
    for (const Json& choice : *choices) one.choices.push_back(text_of(choice));
  }
  if (!options_.group.empty()) {
    const auto group = value.find(options_.group);
    if (group == value.end())
      throw_error<DataError>("field '{}' is missing, which --group names", options_.group);
    one.group = text_of(*group);
    if (one.group.empty()) one.group = "''";  // the table's own name for all rows is empty
  }
  one.value = std::move(value);
  return one;
}

Json EvalRows::truth_of(const Json& value, const data::Row& row) const {
  if (!options_.answer.empty()) {
    Json truth = data::field_at(value, options_.answer);
    if (truth.is_null())
      throw_error<DataError>("field '{}' is missing, which {} names", options_.answer,
                             options_.answer_key);
    return truth;
  }
  for (const char* name : {"answer", "completion", "output"}) {
    const auto found = value.find(name);
    // A completion of turns is the row's last turn.
    const bool is_turns = found != value.end() && found->is_array() && !found->empty() &&
                          found->front().is_object() && !is_open(row);
    if (found != value.end() && !is_turns) return *found;
  }
  if (is_open(row)) return nullptr;
  const Json& turn = row.messages.back();
  if (const auto calls = turn.find("tool_calls"); calls != turn.end() && !calls->empty())
    return as_rendered(row);
  return text_of_content(turn.value("content", Json()));
}

std::string EvalRows::as_rendered(data::Row turns) const {
  // Whatever training would learn of the row, the last turn is looked for here.
  turns.task = data::Task::kLanguageModel;
  turns.message_weights.assign(turns.messages.size(), 0);
  turns.message_weights.back() = 1;
  const data::TokenizedRow row = renderer_.tokenize(turns);
  // labels[i] belongs to token i + 1.
  auto begin = std::ssize(row.labels);
  while (begin > 0 && row.labels[static_cast<std::size_t>(begin) - 1] < 0) --begin;
  const auto end = begin;
  while (begin > 0 && row.labels[static_cast<std::size_t>(begin) - 1] >= 0) --begin;
  std::vector<std::int32_t> turn(row.labels.begin() + begin, row.labels.begin() + end);
  // Generated text leaves special tokens out, too.
  return tokenizer_.decode(turn, /*skip_special_tokens=*/true);
}

std::string EvalRows::truth_text(const EvalCase& one) const { return text_of(one.truth); }

std::vector<std::int32_t> EvalRows::with_answer(const EvalCase& one,
                                                const std::string& answer) const {
  const bool is_text = one.row.form == data::Row::Form::kText;
  std::vector<std::int32_t> tokens = one.prompt;
  for (const std::int32_t id : tokenizer_.encode(is_text ? " " + answer : answer))
    tokens.push_back(id);
  return tokens;
}

data::TokenizedRow EvalRows::learned(const EvalCase& one) const {
  Json value = without_nulls(one.value);
  rename_prompt(value, has_template_ && !options_.raw);
  try {
    data::Row row = data::parse_row(value);
    const bool has_turns = row.form == data::Row::Form::kConversation;
    if (has_turns && is_open(row) && !one.truth.is_null()) {
      row.messages.push_back({{"role", "assistant"}, {"content", truth_text(one)}});
      row.message_weights.push_back(1);
    }
    const bool is_prompt = row.form == data::Row::Form::kText && row.prompt.empty();
    if (is_prompt && !one.truth.is_null()) return answered(one);
    return renderer_.tokenize(row);
  } catch (const DataError& error) {
    fail(one, error.what());
  }
}

data::TokenizedRow EvalRows::answered(const EvalCase& one) const {
  data::TokenizedRow row;
  row.tokens = with_answer(one, truth_text(one));
  row.labels.assign(row.tokens.size(), data::kIgnoredLabel);
  row.weights.assign(row.tokens.size(), 0);
  for (std::size_t i = one.prompt.size(); i < row.tokens.size(); ++i) {
    // labels[i] belongs to token i + 1.
    row.labels[i - 1] = row.tokens[i];
    row.weights[i - 1] = 1;
    ++row.loss_rows;
    ++row.loss_weight_sum;
  }
  row.full_length = std::ssize(row.tokens);
  return row;
}

std::int64_t EvalRows::right_choice(const EvalCase& one) const {
  const std::int64_t count = std::ssize(one.choices);
  if (!one.truth.is_null()) {
    const auto found = std::find(one.choices.begin(), one.choices.end(), truth_text(one));
    if (found != one.choices.end()) return found - one.choices.begin();
  }
  if (one.truth.is_number_integer()) {
    const std::int64_t number = one.truth.get<std::int64_t>();
    if (number >= 0 && number < count) return number;
  } else if (one.truth.is_string()) {
    const std::string& text = one.truth.get_ref<const std::string&>();
    if (text.size() == 1 && text[0] >= 'A' && text[0] < 'A' + count) return text[0] - 'A';
  }
  fail(one, one.truth.is_null() ? std::string("has choices and no answer")
                                : "the answer " + text::shown(truth_text(one)) +
                                      " is none of the choices, nor a number or letter of one");
}

}  // namespace heddle::cli
