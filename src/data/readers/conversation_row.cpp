#include "data/readers/conversation_row.h"

#include <cmath>
#include <limits>
#include <utility>

#include "base/text.h"
#include "data/readers/row_fields.h"

namespace heddle::data {
namespace {

using namespace row_fields;

constexpr double kUnsetWeight = std::numeric_limits<double>::quiet_NaN();
constexpr int kDeepestTools = 100;

constexpr const char* kPartsAdvice =
    "Heddle trains on text; remove the part or put a description in its place, for example "
    "jq -c '.messages[].content |= (if type == \"array\" then map(select(.type == \"text\").text) "
    "| "
    "add else . end)'";

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

void append_turn(std::string role, std::string content, Row& row) {
  row.messages.push_back({{"role", std::move(role)}, {"content", std::move(content)}});
  row.message_weights.push_back(kUnsetWeight);
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

}  // namespace

void append_messages(const ordered_json& list, const std::string& field, const FieldNames& fields,
                     Row& row) {
  if (!list.is_array()) fail(field, "is a JSON {}, expected a list of messages", list.type_name());
  if (list.empty()) fail(field, "is an empty list");
  for (std::size_t i = 0; i < list.size(); ++i) {
    append_message(list[i], fmt::format("{}[{}]", field, i), fields, row);
  }
}

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

}  // namespace heddle::data
