#include "data/readers/message.h"

#include <cmath>
#include <limits>
#include <optional>
#include <utility>

#include "base/text.h"
#include "data/json/json_text.h"
#include "data/readers/row_fields.h"
#include "data/readers/tool_calls.h"

namespace heddle::data {
namespace {

using namespace row_fields;

constexpr double kUnsetWeight = std::numeric_limits<double>::quiet_NaN();

constexpr const char* kPartsAdvice =
    "Heddle trains on text; remove the part or put a description in its place, for example "
    "jq -c '.messages[].content |= (if type == \"array\" then map(select(.type == \"text\").text) "
    "| "
    "add else . end)'";

/// Removes keys that hold null, as Arrow fills them and as transformers drops them from messages.
void drop_nulls(ordered_json& object) {
  auto& items = object.get_ref<ordered_json::object_t&>();
  ordered_json::object_t kept;
  for (auto& [key, value] : items) {
    if (!value.is_null()) {
      static_cast<ordered_json::object_t::Container&>(kept).emplace_back(key, std::move(value));
    }
  }
  items = std::move(kept);
}

/// A part of a content as {"type": "text", "text": ...}.
ordered_json text_part(ordered_json part, const std::string& field) {
  if (part.is_string()) return {{"type", "text"}, {"text", std::move(part)}};
  if (!part.is_object()) {
    fail(field, "is a JSON {}, expected a part object", json_text::type_name(part));
  }
  drop_nulls(part);
  const ordered_json* type = find(part, "type");
  const std::string kind = type != nullptr && type->is_string() ? type->get<std::string>() : "";
  for (const char* medium : {"image", "video", "audio", "image_url", "video_url", "input_audio"}) {
    const ordered_json* held = find(part, medium);
    if (kind == medium || (held != nullptr && !is_nothing(*held))) {
      fail(field, "holds a part of type '{}'. {}", kind == medium || kind.empty() ? medium : kind,
           kPartsAdvice);
    }
    part.erase(medium);
  }
  if (type != nullptr && kind != "text") {
    fail(field, "holds a part of type {}, expected \"text\"", json_text::dump(*find(part, "type")));
  }
  if (find(part, "text") == nullptr) fail(field, "holds a part without 'text'");
  as_string(part["text"], field + ".text");
  if (type == nullptr) {
    ordered_json typed = {{"type", "text"}};
    typed.update(part);
    return typed;
  }
  return part;
}

/// Contents are strings or lists of text parts.
void check_content(ordered_json& content, const std::string& field) {
  if (content.is_string()) return;
  if (!content.is_array()) {
    fail(field, "is a JSON {}, expected a string or a list of text parts",
         json_text::type_name(content));
  }
  for (std::size_t i = 0; i < content.size(); ++i) {
    content[i] = text_part(std::move(content[i]), fmt::format("{}[{}]", field, i));
  }
}

double parse_weight(const ordered_json& value, const std::string& field) {
  if (value.is_boolean()) return value.get<bool>() ? 1 : 0;
  const std::optional<double> weight = json_text::as_double(value);
  if (!weight) fail(field, "is a JSON {}, expected a number", json_text::type_name(value));
  if (!std::isfinite(*weight) || *weight < 0 || *weight > std::numeric_limits<float>::max()) {
    fail(field, "is {}, expected a finite number >= 0", json_text::dump(value));
  }
  return *weight;
}

bool parse_flag(const ordered_json& value, const std::string& field) {
  if (value.is_boolean()) return value.get<bool>();
  if (value == 0 || value == 1) return value == 1;
  fail(field, "is {}, expected true or false (data.fields.weight names a field of weights)",
       json_text::dump(value));
}

}  // namespace

double take_weight(ordered_json& turn, const std::string& place, const FieldNames& fields,
                   bool is_assistant) {
  double weight = kUnsetWeight;
  std::string from;
  const auto set = [&](const std::string& name, double given) {
    if (!std::isnan(weight) && weight != given) {
      fail(place, "'{}' says that the loss counts {} times, '{}' says {} times", from, weight, name,
           given);
    }
    weight = given;
    from = name;
  };
  if (const ordered_json* given = find(turn, fields.weight)) {
    set(fields.weight, parse_weight(*given, place + "." + fields.weight));
  }
  // ms-swift, axolotl
  for (const char* flag : {"loss", "train"}) {
    const ordered_json* given = find(turn, flag);
    if (given == nullptr || flag == fields.weight) continue;
    const bool learns = parse_flag(*given, fmt::format("{}.{}", place, flag));
    // ms-swift looks at `loss` of assistants only.
    if (is_assistant || !learns || flag != std::string_view("loss")) set(flag, learns ? 1 : 0);
    turn.erase(flag);
  }
  if (find(turn, "train_detail") != nullptr) {
    fail(place + ".train_detail",
         "is not supported: the loss of a turn counts as a whole; make "
         "turns of the parts, with 'weight' each");
  }
  if (weight > 0 && !is_assistant) {
    fail(place + "." + from,
         "is {} on a turn that is not the assistant's; only assistant messages "
         "carry loss",
         json_text::dump(turn.contains(from) ? turn[from] : ordered_json(true)));
  }
  turn.erase(fields.weight);
  return weight;
}

void append_calls(ordered_json calls, double weight, const std::string& place, Row& row,
                  std::size_t first) {
  if (row.messages.size() > first && row.messages.back()["role"] == "assistant") {
    double& before = row.message_weights.back();
    if (before != weight && !(std::isnan(before) && std::isnan(weight))) {
      fail(place, "is one turn with the one before it, but their losses count differently");
    }
    ordered_json& turn = row.messages.back();
    if (!turn.contains("tool_calls")) turn["tool_calls"] = ordered_json::array();
    for (ordered_json& call : calls) turn["tool_calls"].push_back(std::move(call));
    return;
  }
  row.messages.push_back(
      {{"role", "assistant"}, {"content", ""}, {"tool_calls", std::move(calls)}});
  row.message_weights.push_back(weight);
}

void append_message(ordered_json message, const std::string& place, const FieldNames& fields,
                    std::size_t first, Row& row) {
  if (!message.is_object()) {
    fail(place, "is a JSON {}, expected an object", json_text::type_name(message));
  }
  const bool has_content = message.contains("content");
  drop_nulls(message);
  const ordered_json* role = find(message, "role");
  if (role == nullptr) fail(place + ".role", "is missing");
  std::string name = as_string(*role, place + ".role");
  if (name.empty()) fail(place + ".role", "is empty");
  const bool is_call = is_call_role(name);
  const double weight = take_weight(message, place, fields, is_call || name == "assistant");
  if (is_call) {
    if (!message.contains("content")) fail(place + ".content", "is missing");
    append_calls(parse_calls(message["content"], place + ".content"), weight, place, row, first);
    return;
  }
  if (is_answer_role(name)) message["role"] = name = "tool";
  normalize_calls(message, place);
  if (message.contains("content")) {
    check_content(message["content"], place + ".content");
  } else if (!has_content && name != "tool" && !message.contains("tool_calls") &&
             !message.contains("reasoning_content")) {
    fail(place + ".content", "is missing");
  }
  row.message_weights.push_back(weight);
  row.messages.push_back(std::move(message));
}

void append_messages(const ordered_json& given, const std::string& field, const FieldNames& fields,
                     Row& row) {
  const bool is_text =
      given.is_string() && text::trim(given.get_ref<const std::string&>()).starts_with('[');
  const ordered_json list =
      is_text ? parse_json_field(given.get_ref<const std::string&>(), field) : given;
  if (!list.is_array()) {
    fail(field, "is a JSON {}, expected a list of messages", json_text::type_name(given));
  }
  if (list.empty()) fail(field, "is an empty list");
  const std::size_t first = row.messages.size();
  for (std::size_t i = 0; i < list.size(); ++i) {
    append_message(list[i], fmt::format("{}[{}]", field, i), fields, first, row);
  }
}

}  // namespace heddle::data
