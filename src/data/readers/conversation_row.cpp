#include "data/readers/conversation_row.h"

#include <algorithm>
#include <array>
#include <limits>
#include <string_view>
#include <utility>

#include "base/text.h"
#include "data/json/json_text.h"
#include "data/readers/message.h"
#include "data/readers/row_fields.h"
#include "data/readers/tool_calls.h"

namespace heddle::data {
namespace {

using namespace row_fields;

void append_turn(std::string role, std::string content, Row& row) {
  row.messages.push_back({{"role", std::move(role)}, {"content", std::move(content)}});
  row.message_weights.push_back(std::numeric_limits<double>::quiet_NaN());
}

std::string role_of_speaker(const std::string& from, const std::string& field) {
  if (from == "human" || from == "user") return "user";
  if (from == "gpt" || from == "assistant" || from == "chatgpt" || from == "bing" ||
      from == "bard" || from == "model") {
    return "assistant";
  }
  if (from == "system") return "system";
  if (is_answer_role(from)) return "tool";
  fail(field, "is '{}', expected human, gpt, system, function_call, tool or observation", from);
}

}  // namespace

/// Tools are a list; some data sets keep it, or each of it, as a JSON text. OpenAI's older form has
/// `functions`.
void parse_tools(const ordered_json& value, const FieldNames& fields, Row& row) {
  const ordered_json* tools = find(value, fields.tools);
  const bool is_old = tools == nullptr && find(value, "functions") != nullptr;
  const std::string field = is_old ? "functions" : fields.tools;
  if (is_old) tools = find(value, field);
  if (tools == nullptr) return;
  ordered_json list = *tools;
  if (tools->is_string()) {
    const std::string& source = tools->get_ref<const std::string&>();
    if (text::trim(source).empty()) return;
    list = parse_json_field(source, field);
    if (list.is_null()) return;
  }
  if (!list.is_array()) fail(field, "is a JSON {}, expected a list", json_text::type_name(list));
  for (std::size_t i = 0; i < list.size(); ++i) {
    const std::string place = fmt::format("{}[{}]", field, i);
    if (list[i].is_string()) {
      ordered_json tool = parse_json_field(list[i].get_ref<const std::string&>(), place);
      list[i] = std::move(tool);
    }
    if (!list[i].is_object()) {
      fail(place, "is a JSON {}, expected an object", json_text::type_name(list[i]));
    }
    if (is_old) list[i] = {{"type", "function"}, {"function", ordered_json(list[i])}};
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
    fail(fields.conversations, "is a JSON {}, expected a list", json_text::type_name(turns));
  }
  if (turns.empty()) fail(fields.conversations, "is an empty list");
  if (const std::string system = optional_string(value, fields.system); !system.empty()) {
    append_turn("system", system, row);
  }
  const std::size_t first = row.messages.size();
  for (std::size_t i = 0; i < turns.size(); ++i) {
    const std::string place = fmt::format("{}[{}]", fields.conversations, i);
    ordered_json turn = turns[i];
    if (!turn.is_object()) {
      fail(place, "is a JSON {}, expected an object", json_text::type_name(turn));
    }
    const ordered_json* from = find(turn, fields.from);
    if (from == nullptr) {
      // Data sets exist that name the field `conversations` and fill it with role and content.
      if (find(turn, "role") != nullptr) {
        append_message(std::move(turn), place, fields, first, row);
        continue;
      }
      fail(place + "." + fields.from, "is missing");
    }
    const ordered_json* said = find(turn, fields.value);
    if (said == nullptr) fail(place + "." + fields.value, "is missing");
    const std::string where = place + "." + fields.from;
    const std::string speaker = as_string(*from, where);
    if (is_call_role(speaker)) {
      ordered_json calls = parse_calls(*said, place + "." + fields.value);
      append_calls(std::move(calls), take_weight(turn, place, fields, true), place, row, first);
      continue;
    }
    const std::string role = role_of_speaker(speaker, where);
    append_turn(role, as_string(*said, place + "." + fields.value), row);
    row.message_weights.back() = take_weight(turn, place, fields, role == "assistant");
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
         json_text::type_name(completion), fields.prompt, json_text::type_name(prompt));
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
      fail(fields.history, "is a JSON {}, expected a list of pairs",
           json_text::type_name(*history));
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

bool is_template_argument(const std::string& name) {
  constexpr std::array<std::string_view, 14> kArguments = {"messages",
                                                           "conversation",
                                                           "tools",
                                                           "chat_template",
                                                           "tokenize",
                                                           "add_generation_prompt",
                                                           "continue_final_message",
                                                           "padding",
                                                           "truncation",
                                                           "max_length",
                                                           "return_tensors",
                                                           "return_dict",
                                                           "return_assistant_tokens_mask",
                                                           "tokenizer_kwargs"};
  return std::ranges::find(kArguments, name) != kArguments.end();
}

void parse_template_variables(const ordered_json& value, Row& row) {
  const std::string field = "chat_template_kwargs";
  const ordered_json* given = find(value, field);
  if (given == nullptr) return;
  ordered_json variables =
      given->is_string() ? parse_json_field(given->get_ref<const std::string&>(), field) : *given;
  if (!variables.is_object()) {
    fail(field, "is a JSON {}, expected an object", json_text::type_name(variables));
  }
  for (const auto& [name, unused] : variables.items()) {
    if (is_template_argument(name)) {
      fail(fmt::format("{}.{}", field, name),
           "is an argument of apply_chat_template that a row cannot set, not a variable of the "
           "template");
    }
  }
  row.template_variables = std::move(variables);
}

}  // namespace heddle::data
