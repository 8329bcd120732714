#include "data/readers/row.h"

#include <algorithm>
#include <array>
#include <cmath>
#include <limits>
#include <utility>

#include "base/errors.h"
#include "base/text.h"

namespace heddle::data {
namespace {

using nlohmann::ordered_json;

constexpr std::array<std::pair<RowFormat, std::string_view>, 8> kNames = {
    {{RowFormat::kAuto, "auto"},
     {RowFormat::kTokens, "tokens"},
     {RowFormat::kMessages, "messages"},
     {RowFormat::kConversations, "sharegpt"},
     {RowFormat::kPromptCompletion, "prompt_completion"},
     {RowFormat::kInstruction, "alpaca"},
     {RowFormat::kText, "text"},
     {RowFormat::kPairs, "pairs"}}};

constexpr double kUnsetWeight = std::numeric_limits<double>::quiet_NaN();
constexpr int kDeepestTools = 100;

constexpr const char* kPartsAdvice =
    "Heddle trains on text; remove the part or put a description in its place, for example "
    "jq -c '.messages[].content |= (if type == \"array\" then map(select(.type == \"text\").text) "
    "| "
    "add else . end)'";

template <class... Args>
[[noreturn]] void fail(const std::string& field, fmt::format_string<Args...> format,
                       Args&&... args) {
  throw_error<DataError>("field '{}': {}", field, fmt::format(format, std::forward<Args>(args)...));
}

/// The field, or null if it is absent or null.
const ordered_json* find(const ordered_json& object, const std::string& name) {
  const auto found = object.find(name);
  return found == object.end() || found->is_null() ? nullptr : &*found;
}

const ordered_json& require(const ordered_json& object, const std::string& name) {
  if (const ordered_json* value = find(object, name)) return *value;
  std::vector<std::string> keys;
  for (const auto& [key, unused] : object.items()) keys.push_back(key);
  const std::string nearest = text::nearest(name, keys);
  fail(name, "is missing; the row has {}{}",
       keys.empty() ? "no field" : "'" + text::list_some(keys, 6) + "'",
       nearest.empty() ? "" : fmt::format(" (did you mean '{}'? data.fields renames)", nearest));
}

const std::string& as_string(const ordered_json& value, const std::string& field) {
  if (!value.is_string()) fail(field, "is a JSON {}, expected a string", value.type_name());
  return value.get_ref<const std::string&>();
}

std::string optional_string(const ordered_json& object, const std::string& field) {
  const ordered_json* value = find(object, field);
  return value == nullptr ? "" : as_string(*value, field);
}

void check_text_part(const ordered_json& part, const std::string& field) {
  if (!part.is_object()) fail(field, "is a JSON {}, expected a part object", part.type_name());
  const ordered_json* type = find(part, "type");
  const std::string kind = type != nullptr && type->is_string() ? type->get<std::string>() : "";
  for (const char* medium : {"image", "video", "audio", "image_url", "video_url", "input_audio"}) {
    if (kind == medium || part.contains(medium)) {
      fail(field, "holds a part of type '{}'. {}", kind.empty() ? medium : kind, kPartsAdvice);
    }
  }
  if (!kind.empty() && kind != "text")
    fail(field, "holds a part of type '{}', expected 'text'", kind);
  if (find(part, "text") == nullptr) fail(field, "holds a part without 'text'");
}

/// Contents as a list of text parts become one string, as chat templates join them.
ordered_json flatten_content(const ordered_json& content, const std::string& field) {
  if (content.is_string() || content.is_null()) return content;
  if (!content.is_array()) {
    fail(field, "is a JSON {}, expected a string or a list of text parts", content.type_name());
  }
  std::string joined;
  for (std::size_t i = 0; i < content.size(); ++i) {
    const std::string place = fmt::format("{}[{}]", field, i);
    if (content[i].is_string()) {
      joined += content[i].get_ref<const std::string&>();
      continue;
    }
    check_text_part(content[i], place);
    joined += as_string(content[i]["text"], place + ".text");
  }
  return joined;
}

double parse_weight(const ordered_json& value, const std::string& field) {
  if (value.is_boolean()) return value.get<bool>() ? 1 : 0;
  if (!value.is_number()) fail(field, "is a JSON {}, expected a number", value.type_name());
  const double weight = value.get<double>();
  if (!std::isfinite(weight) || weight < 0 || weight > std::numeric_limits<float>::max()) {
    fail(field, "is {}, expected a finite number >= 0", value.dump());
  }
  return weight;
}

void append_message(ordered_json message, const std::string& place, const FieldNames& fields,
                    Row& row) {
  if (!message.is_object()) fail(place, "is a JSON {}, expected an object", message.type_name());
  const ordered_json* role = find(message, "role");
  if (role == nullptr) fail(place + ".role", "is missing");
  if (as_string(*role, place + ".role").empty()) fail(place + ".role", "is empty");
  const bool calls_tools = find(message, "tool_calls") != nullptr;
  if (find(message, "content") == nullptr) {
    if (!calls_tools && find(message, "reasoning_content") == nullptr) {
      fail(place + ".content", "is missing");
    }
    message["content"] = "";
  } else {
    message["content"] = flatten_content(message["content"], place + ".content");
  }
  if (calls_tools && !message["tool_calls"].is_array()) {
    fail(place + ".tool_calls", "is a JSON {}, expected a list", message["tool_calls"].type_name());
  }
  double weight = kUnsetWeight;
  if (const ordered_json* given = find(message, fields.weight)) {
    weight = parse_weight(*given, place + "." + fields.weight);
    if (weight != 0 && message["role"] != "assistant") {
      fail(place + "." + fields.weight,
           "is {} on a message of role '{}'; only assistant messages "
           "carry loss",
           given->dump(), message["role"].get_ref<const std::string&>());
    }
  }
  message.erase(fields.weight);
  row.message_weights.push_back(weight);
  row.messages.push_back(std::move(message));
}

void append_messages(const ordered_json& list, const std::string& field, const FieldNames& fields,
                     Row& row) {
  if (!list.is_array()) fail(field, "is a JSON {}, expected a list of messages", list.type_name());
  if (list.empty()) fail(field, "is an empty list");
  for (std::size_t i = 0; i < list.size(); ++i) {
    append_message(list[i], fmt::format("{}[{}]", field, i), fields, row);
  }
}

void append_turn(std::string role, std::string content, Row& row) {
  row.messages.push_back({{"role", std::move(role)}, {"content", std::move(content)}});
  row.message_weights.push_back(kUnsetWeight);
}

/// Tools are a list; some data sets keep it as a JSON text.
void parse_tools(const ordered_json& value, const FieldNames& fields, Row& row) {
  const ordered_json* tools = find(value, fields.tools);
  if (tools == nullptr) return;
  ordered_json list = *tools;
  if (list.is_string()) {
    const std::string& source = list.get_ref<const std::string&>();
    if (text::trim(source).empty()) return;
    if (nesting_of(source, kDeepestTools) > kDeepestTools) {
      fail(fields.tools, "is nested deeper than {}", kDeepestTools);
    }
    // The source lives inside `list`: parse before it is overwritten.
    ordered_json parsed = ordered_json::parse(source, nullptr, /*allow_exceptions=*/false);
    if (parsed.is_discarded()) fail(fields.tools, "is a string that is not valid JSON");
    list = std::move(parsed);
  }
  if (!list.is_array()) fail(fields.tools, "is a JSON {}, expected a list", list.type_name());
  for (std::size_t i = 0; i < list.size(); ++i) {
    if (!list[i].is_object()) {
      fail(fmt::format("{}[{}]", fields.tools, i), "is a JSON {}, expected an object",
           list[i].type_name());
    }
  }
  if (!list.empty()) row.tools = std::move(list);
}

void parse_messages(const ordered_json& value, const FieldNames& fields, Row& row) {
  append_messages(require(value, fields.messages), fields.messages, fields, row);
  parse_tools(value, fields, row);
}

std::string role_of_speaker(const std::string& from, const std::string& field) {
  if (from == "human" || from == "user") return "user";
  if (from == "gpt" || from == "assistant" || from == "chatgpt" || from == "bing" ||
      from == "bard" || from == "model") {
    return "assistant";
  }
  if (from == "system") return "system";
  if (from == "tool" || from == "observation" || from == "function_response") return "tool";
  fail(field, "is '{}', expected human, gpt, system, tool or observation", from);
}

void parse_conversations(const ordered_json& value, const FieldNames& fields, Row& row) {
  const ordered_json& turns = require(value, fields.conversations);
  if (!turns.is_array()) {
    fail(fields.conversations, "is a JSON {}, expected a list", turns.type_name());
  }
  if (turns.empty()) fail(fields.conversations, "is an empty list");
  if (const std::string system = optional_string(value, fields.system); !system.empty()) {
    append_turn("system", system, row);
  }
  for (std::size_t i = 0; i < turns.size(); ++i) {
    const std::string place = fmt::format("{}[{}]", fields.conversations, i);
    if (!turns[i].is_object())
      fail(place, "is a JSON {}, expected an object", turns[i].type_name());
    const ordered_json* from = find(turns[i], fields.from);
    if (from == nullptr) {
      // Data sets exist that name the field `conversations` and fill it with role and content.
      if (find(turns[i], "role") != nullptr) {
        append_message(turns[i], place, fields, row);
        continue;
      }
      fail(place + "." + fields.from, "is missing");
    }
    const ordered_json* said = find(turns[i], fields.value);
    if (said == nullptr) fail(place + "." + fields.value, "is missing");
    const std::string where = place + "." + fields.from;
    append_turn(role_of_speaker(as_string(*from, where), where),
                as_string(*said, place + "." + fields.value), row);
    if (const ordered_json* weight = find(turns[i], fields.weight)) {
      row.message_weights.back() = parse_weight(*weight, place + "." + fields.weight);
      if (row.message_weights.back() != 0 && row.messages.back()["role"] != "assistant") {
        fail(place + "." + fields.weight, "is not 0; only assistant turns carry loss");
      }
    }
  }
  parse_tools(value, fields, row);
}

void parse_prompt_completion(const ordered_json& value, const FieldNames& fields, Row& row) {
  const ordered_json& prompt = require(value, fields.prompt);
  const ordered_json& completion = require(value, fields.completion);
  if (prompt.is_string() && completion.is_string()) {
    row.form = Row::Form::kText;
    row.prompt = prompt.get<std::string>();
    row.text = completion.get<std::string>();
    if (row.text.empty()) fail(fields.completion, "is empty");
    return;
  }
  if (prompt.is_string() != completion.is_string()) {
    fail(fields.completion, "is a JSON {} but '{}' is a {}; both must be strings or both lists",
         completion.type_name(), fields.prompt, prompt.type_name());
  }
  append_messages(prompt, fields.prompt, fields, row);
  row.prompt_messages = row.messages.size();
  append_messages(completion, fields.completion, fields, row);
  parse_tools(value, fields, row);
}

void parse_instruction(const ordered_json& value, const FieldNames& fields, Row& row) {
  const std::string instruction = as_string(require(value, fields.instruction), fields.instruction);
  const std::string input = optional_string(value, fields.input);
  const std::string output = as_string(require(value, fields.output), fields.output);
  if (instruction.empty() && input.empty())
    fail(fields.instruction, "is empty, and so is '{}'", fields.input);
  if (const std::string system = optional_string(value, fields.system); !system.empty()) {
    append_turn("system", system, row);
  }
  if (const ordered_json* history = find(value, fields.history)) {
    if (!history->is_array()) {
      fail(fields.history, "is a JSON {}, expected a list of pairs", history->type_name());
    }
    for (std::size_t i = 0; i < history->size(); ++i) {
      const ordered_json& pair = (*history)[i];
      const std::string place = fmt::format("{}[{}]", fields.history, i);
      if (!pair.is_array() || pair.size() != 2) fail(place, "is not a pair of two strings");
      append_turn("user", as_string(pair[0], place), row);
      append_turn("assistant", as_string(pair[1], place), row);
    }
  }
  const char* separator = instruction.empty() || input.empty() ? "" : "\n\n";
  append_turn("user", instruction + separator + input, row);
  append_turn("assistant", output, row);
}

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
