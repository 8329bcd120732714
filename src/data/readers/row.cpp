#include "data/readers/row.h"

#include <algorithm>
#include <array>
#include <cmath>
#include <limits>
#include <utility>

#include "base/text.h"
#include "data/readers/conversation_row.h"
#include "data/readers/row_fields.h"

namespace heddle::data {
namespace {

using namespace row_fields;

constexpr std::array<std::pair<RowFormat, std::string_view>, 8> kNames = {
    {{RowFormat::kAuto, "auto"},
     {RowFormat::kTokens, "tokens"},
     {RowFormat::kMessages, "messages"},
     {RowFormat::kConversations, "sharegpt"},
     {RowFormat::kPromptCompletion, "prompt_completion"},
     {RowFormat::kInstruction, "alpaca"},
     {RowFormat::kText, "text"},
     {RowFormat::kPairs, "pairs"}}};

std::vector<std::int32_t> parse_ids(const ordered_json& list, const std::string& field,
                                    bool allow_ignored) {
  if (!list.is_array()) fail(field, "is a JSON {}, expected a list of token ids", list.type_name());
  std::vector<std::int32_t> ids;
  ids.reserve(list.size());
  for (std::size_t i = 0; i < list.size(); ++i) {
    const std::string expected = allow_ignored ? "a token id or -100" : "a token id";
    if (!list[i].is_number_integer()) {
      fail(fmt::format("{}[{}]", field, i), "is a JSON {}, expected {}", list[i].type_name(),
           expected);
    }
    // An unsigned number beyond int64 would turn negative in get<int64>.
    const bool is_huge = list[i].is_number_unsigned() &&
                         list[i].get<std::uint64_t>() > std::numeric_limits<std::int32_t>::max();
    const std::int64_t id = is_huge ? -1 : list[i].get<std::int64_t>();
    const bool is_ignored = allow_ignored && id == -100 && !is_huge;
    if (!is_ignored && (id < 0 || id > std::numeric_limits<std::int32_t>::max())) {
      fail(fmt::format("{}[{}]", field, i), "is {}, expected {}", list[i].dump(), expected);
    }
    ids.push_back(static_cast<std::int32_t>(id));
  }
  return ids;
}

void parse_tokens(const ordered_json& value, const FieldNames& fields, Row& row) {
  row.form = Row::Form::kTokens;
  row.input_ids = parse_ids(require(value, fields.input_ids), fields.input_ids, false);
  if (row.input_ids.empty()) fail(fields.input_ids, "is an empty list");
  if (const ordered_json* labels = find(value, fields.labels)) {
    row.labels = parse_ids(*labels, fields.labels, true);
    if (row.labels.size() != row.input_ids.size()) {
      fail(fields.labels, "has {} entries but '{}' has {}", row.labels.size(), fields.input_ids,
           row.input_ids.size());
    }
  }
}

void parse_text(const ordered_json& value, const FieldNames& fields, Row& row) {
  row.form = Row::Form::kText;
  row.text = as_string(require(value, fields.text), fields.text);
  if (row.text.empty()) fail(fields.text, "is empty");
}

/// One text of a pair: a string, a list of messages, or a list of token ids.
Row parse_pair_text(const ordered_json& value, const std::string& field, const FieldNames& fields) {
  Row row;
  row.task = Task::kEmbedding;
  if (value.is_string()) {
    row.text = value.get<std::string>();
    if (row.text.empty()) fail(field, "is empty");
    return row;
  }
  if (!value.is_array()) {
    fail(field, "is a JSON {}, expected a text, a list of messages or a list of token ids",
         value.type_name());
  }
  if (!value.empty() && value[0].is_number()) {
    row.form = Row::Form::kTokens;
    row.format = RowFormat::kTokens;
    row.input_ids = parse_ids(value, field, false);
    return row;
  }
  row.form = Row::Form::kConversation;
  row.format = RowFormat::kMessages;
  append_messages(value, field, fields, row);
  return row;
}

/// Whether a list holds texts, and is not one text itself (of messages or token ids).
bool is_list_of_texts(const ordered_json& value) {
  return value.is_array() && !value.empty() && (value[0].is_string() || value[0].is_array());
}

void parse_pairs(const ordered_json& value, const FieldNames& fields, Row& row) {
  row.form = Row::Form::kGroup;
  row.texts.push_back(parse_pair_text(require(value, fields.query), fields.query, fields));
  const ordered_json& positive = require(value, fields.positive);
  if (is_list_of_texts(positive)) {
    // Some data sets keep a list of positives; a row has one.
    if (positive.size() != 1) {
      fail(fields.positive, "holds {} texts, expected one; make a row of each", positive.size());
    }
    row.texts.push_back(parse_pair_text(positive[0], fields.positive + "[0]", fields));
  } else {
    row.texts.push_back(parse_pair_text(positive, fields.positive, fields));
  }
  const ordered_json* negatives = find(value, fields.negatives);
  if (negatives == nullptr || (negatives->is_array() && negatives->empty())) return;
  if (!is_list_of_texts(*negatives)) {
    row.texts.push_back(parse_pair_text(*negatives, fields.negatives, fields));
    return;
  }
  for (std::size_t i = 0; i < negatives->size(); ++i) {
    row.texts.push_back(
        parse_pair_text((*negatives)[i], fmt::format("{}[{}]", fields.negatives, i), fields));
  }
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
    if (media == nullptr || (media->is_array() && media->empty()) ||
        (media->is_string() && media->get_ref<const std::string&>().empty())) {
      continue;
    }
    fail(name,
         "the row comes with media. Heddle trains on text; remove the field and its "
         "placeholders in the text, for example jq -c 'del(.{})'",
         name);
  }
}

void parse_target(const ordered_json& value, const FieldNames& fields, Row& row) {
  if (row.task != Task::kClassification && row.task != Task::kRegression) return;
  const ordered_json& label = require(value, fields.label);
  if (row.task == Task::kClassification) {
    const bool fits = label.is_number_integer() &&
                      !(label.is_number_unsigned() && label.get<std::uint64_t>() > (1u << 30)) &&
                      label.get<std::int64_t>() >= 0;
    if (!fits) fail(fields.label, "is {}, expected the number of a class, from 0", label.dump());
    row.target = static_cast<double>(label.get<std::int64_t>());
    return;
  }
  if (!label.is_number() || !std::isfinite(label.get<double>())) {
    fail(fields.label, "is {}, expected a finite number", label.dump());
  }
  row.target = label.get<double>();
}

}  // namespace

std::string_view name_of(RowFormat format) {
  for (const auto& [known, name] : kNames) {
    if (known == format) return name;
  }
  throw_error<InternalError>("row format {} has no name", static_cast<int>(format));
}

RowFormat row_format_of(std::string_view name) {
  std::vector<std::string> names;
  for (const auto& [format, known] : kNames) {
    if (known == name) return format;
    names.emplace_back(known);
  }
  throw_error<ConfigError>("unknown row format '{}', expected one of {}", name,
                           text::list_some(names));
}

int nesting_of(std::string_view json, int limit) {
  int depth = 0, deepest = 0;
  bool in_string = false;
  for (std::size_t i = 0; i < json.size() && deepest <= limit; ++i) {
    const char c = json[i];
    if (in_string) {
      if (c == '\\') {
        ++i;
      } else if (c == '"') {
        in_string = false;
      }
    } else if (c == '"') {
      in_string = true;
    } else if (c == '[' || c == '{') {
      deepest = std::max(deepest, ++depth);
    } else if (c == ']' || c == '}') {
      --depth;
    }
  }
  return deepest;
}

Row parse_row(const ordered_json& value, RowFormat format, const FieldNames& fields, Task task) {
  if (!value.is_object()) {
    throw_error<DataError>("the row is a JSON {}, expected an object", value.type_name());
  }
  refuse_media(value);
  Row row;
  row.task = task;
  const bool wants_pairs = task == Task::kContrastive;
  if (format != RowFormat::kAuto && (format == RowFormat::kPairs) != wants_pairs) {
    throw_error<ConfigError>("data.format is '{}', but {}", name_of(format),
                             wants_pairs ? "model.head embed learns from 'pairs'"
                                         : "only model.head embed learns from pairs");
  }
  row.format = wants_pairs                  ? RowFormat::kPairs
               : format == RowFormat::kAuto ? detect(value, fields)
                                            : format;
  row.form = Row::Form::kConversation;
  switch (row.format) {
    case RowFormat::kPairs:
      parse_pairs(value, fields, row);
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
  parse_target(value, fields, row);
  return row;
}

}  // namespace heddle::data
