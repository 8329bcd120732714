#include "data/readers/row.h"

#include <algorithm>
#include <charconv>
#include <cmath>
#include <utility>

#include "base/text.h"
#include "data/json/json_text.h"
#include "data/readers/conversation_row.h"
#include "data/readers/group_row.h"
#include "data/readers/message.h"
#include "data/readers/row_fields.h"
#include "data/readers/token_row.h"

namespace heddle::data {
namespace {

using namespace row_fields;

void parse_text(const ordered_json& value, const FieldNames& fields, Row& row) {
  row.form = Row::Form::kText;
  row.text = as_string(require(value, fields.text), fields.text);
  if (row.text.empty()) fail(fields.text, "is empty");
}

RowFormat detect(const ordered_json& value, const FieldNames& fields) {
  const auto has = [&](const std::string& name) { return find(value, name) != nullptr; };
  if (has(fields.input_ids)) return RowFormat::kTokens;
  if (has(fields.messages)) return RowFormat::kMessages;
  if (has(fields.conversations)) return RowFormat::kConversations;
  if (has(fields.prompt) && has(fields.completion)) return RowFormat::kPromptCompletion;
  if (has(fields.instruction) && has(fields.output)) return RowFormat::kInstruction;
  if (has(fields.text)) return RowFormat::kText;
  std::vector<std::string> keys;
  for (const auto& [key, unused] : value.items()) keys.push_back(key);
  throw_error<DataError>(
      "no field tells the row's format: expected '{}', '{}', '{}', '{}' with '{}', '{}' with '{}', "
      "or '{}' (data.fields renames them); the row has {}",
      fields.input_ids, fields.messages, fields.conversations, fields.prompt, fields.completion,
      fields.instruction, fields.output, fields.text,
      keys.empty() ? "no field" : "'" + text::list_some(keys, 6) + "'");
}

/// Data sets for multimodal models name their media beside the text.
void refuse_media(const ordered_json& value) {
  for (const char* name : {"images", "image", "videos", "video", "audios", "audio"}) {
    const ordered_json* media = find(value, name);
    if (media == nullptr || is_nothing(*media)) continue;
    fail(name,
         "the row comes with media. Heddle trains on text; remove the field and its "
         "placeholders in the text, for example jq -c 'del(.{})'",
         name);
  }
}

bool is_all_digits(const std::string& text) {
  return !text.empty() && text.find_first_not_of("0123456789") == std::string::npos;
}

/// The number of a class: itself, by its name, or its digits, which is all that a CSV has. Where
/// names are digits, every number is a name: which one is meant else depends on the file's form.
std::int64_t class_of(const ordered_json& label, const RowOptions& options) {
  const std::string& field = options.fields.label;
  const auto& names = options.class_names;
  const bool numbers_are_names = std::ranges::any_of(names, is_all_digits);
  if (label.is_string() || (label.is_number_integer() && numbers_are_names)) {
    const auto named = std::ranges::find(
        names, label.is_string() ? label.get_ref<const std::string&>() : label.dump());
    if (named != names.end()) return named - names.begin();
  }
  std::optional<std::int64_t> number;
  if (label.is_string() && !numbers_are_names) {
    const std::string& digits = label.get_ref<const std::string&>();
    if (digits.size() < 10 && is_all_digits(digits)) number = std::stoll(digits);
  } else if (label.is_number_integer() && !numbers_are_names && label >= 0 && label <= (1 << 30)) {
    number = label.get<std::int64_t>();
  }
  if (!number) {
    if (!options.class_names.empty()) {
      fail(field, "is {}, expected one of the {} labels: {} (data.labels names others)",
           json_text::dump(label), options.class_names.size(),
           text::list_some(options.class_names));
    }
    fail(field, "is {}, expected the number of a class, from 0{}", json_text::dump(label),
         label.is_string() ? ", or a name of data.labels" : "");
  }
  if (options.classes > 0 && *number >= options.classes) {
    fail(field, "is {}, but model.num_labels is {}: expected 0 to {}", *number, options.classes,
         options.classes - 1);
  }
  return *number;
}

/// The number that a text spells, which is all that a CSV has.
std::optional<double> number_of_text(const std::string& text) {
  double number = 0;
  const auto read = std::from_chars(text.data(), text.data() + text.size(), number);
  if (read.ec != std::errc() || read.ptr != text.data() + text.size()) return std::nullopt;
  return number;
}

void parse_target(const ordered_json& value, const RowOptions& options, Row& row) {
  if (row.task != Task::kClassification && row.task != Task::kRegression) return;
  const std::string& field = options.fields.label;
  const ordered_json& label = require(value, field);
  if (row.task == Task::kClassification) {
    row.target = static_cast<double>(class_of(label, options));
    return;
  }
  std::optional<double> number = json_text::as_double(label);
  if (label.is_string()) number = number_of_text(label.get_ref<const std::string&>());
  if (!number || !std::isfinite(*number)) {
    fail(field, "is {}, expected a finite number", json_text::dump(label));
  }
  row.target = number;
}

/// Bytes, about, that a copy of the value takes.
std::size_t bytes_of(const ordered_json& value) {
  std::size_t bytes = sizeof value;
  if (value.is_string()) bytes += value.get_ref<const std::string&>().size();
  if (value.is_array()) {
    for (const ordered_json& item : value) bytes += bytes_of(item);
  }
  if (value.is_object()) {
    for (const auto& [key, item] : value.get_ref<const ordered_json::object_t&>())
      bytes += sizeof key + key.size() + bytes_of(item);
  }
  return bytes;
}

/// Each conversation of the row has the template's variables.
void share_template_variables(Row& row) {
  constexpr std::size_t kMostBytes = std::size_t{256} << 20;
  const auto is_conversation = [](const Row& text) {
    return text.form == Row::Form::kConversation;
  };
  const auto count = static_cast<std::size_t>(std::ranges::count_if(row.texts, is_conversation));
  if (count == 0 || row.template_variables.is_null()) return;
  if (const std::size_t bytes = bytes_of(row.template_variables); bytes > kMostBytes / count) {
    fail("chat_template_kwargs",
         "takes {} for each of the row's {} conversations, which is more than {} in all; give the "
         "row fewer or shorter variables",
         text::format_bytes(static_cast<double>(bytes)), count,
         text::format_bytes(static_cast<double>(kMostBytes)));
  }
  for (Row& text : row.texts) {
    if (is_conversation(text)) text.template_variables = row.template_variables;
  }
}

}  // namespace

Row parse_row(const ordered_json& value, const RowOptions& options) {
  const RowFormat format = options.format;
  const FieldNames& fields = options.fields;
  if (!value.is_object()) {
    throw_error<DataError>("the row is a JSON {}, expected an object", json_text::type_name(value));
  }
  refuse_media(value);
  Row row;
  row.task = options.task;
  const bool wants_pairs = row.task == Task::kGroup;
  if (format != RowFormat::kAuto && (format == RowFormat::kPairs) != wants_pairs) {
    if (!wants_pairs) {
      throw_error<ConfigError>(
          "data.format is 'pairs', but this run learns from single texts; pairs are for model.head "
          "embed and train.objective dpo and reward");
    }
    throw_error<ConfigError>(
        "data.format is '{}', but this run learns from 'pairs': rows with the fields {}",
        to_string(format), text::list_some(options.group.texts));
  }
  row.format = wants_pairs                  ? RowFormat::kPairs
               : format == RowFormat::kAuto ? detect(value, fields)
                                            : format;
  row.form = Row::Form::kConversation;
  switch (row.format) {
    case RowFormat::kPairs:
      parse_group(value, fields, options.group, row);
      break;
    case RowFormat::kTokens:
      parse_tokens(value, fields, row);
      break;
    case RowFormat::kMessages:
      parse_messages(value, fields, row);
      break;
    case RowFormat::kConversations:
      parse_conversations(value, fields, row);
      break;
    case RowFormat::kPromptCompletion:
      parse_prompt_completion(value, fields, row);
      break;
    case RowFormat::kInstruction:
      parse_instruction(value, fields, row);
      break;
    default:
      parse_text(value, fields, row);
      break;
  }
  parse_template_variables(value, row);
  share_template_variables(row);
  parse_target(value, options, row);
  return row;
}

}  // namespace heddle::data
