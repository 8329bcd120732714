#include "data/readers/row.h"

#include <algorithm>
#include <array>
#include <cmath>
#include <utility>

#include "base/text.h"
#include "data/readers/conversation_row.h"
#include "data/readers/group_row.h"
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

Row parse_row(const ordered_json& value, RowFormat format, const FieldNames& fields, Task task,
              const GroupShape& group) {
  if (!value.is_object()) {
    throw_error<DataError>("the row is a JSON {}, expected an object", value.type_name());
  }
  refuse_media(value);
  Row row;
  row.task = task;
  const bool wants_pairs = task == Task::kGroup;
  if (format != RowFormat::kAuto && (format == RowFormat::kPairs) != wants_pairs) {
    if (!wants_pairs) {
      throw_error<ConfigError>(
          "data.format is 'pairs', but this run learns from single texts; pairs are for model.head "
          "embed and train.objective dpo and reward");
    }
    throw_error<ConfigError>(
        "data.format is '{}', but this run learns from 'pairs': rows with the fields {}",
        name_of(format), text::list_some(group.texts));
  }
  row.format = wants_pairs                  ? RowFormat::kPairs
               : format == RowFormat::kAuto ? detect(value, fields)
                                            : format;
  row.form = Row::Form::kConversation;
  switch (row.format) {
    case RowFormat::kPairs:
      parse_group(value, fields, group, row);
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
