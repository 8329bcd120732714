#include "data/readers/tool_calls.h"

#include <algorithm>
#include <utility>

#include "base/text.h"
#include "data/json/json_text.h"
#include "data/readers/row_fields.h"

namespace heddle::data {
namespace {

using namespace row_fields;

template <std::size_t count>
bool is_one_of(const std::string& role, const char* const (&names)[count]) {
  return std::find(std::begin(names), std::end(names), role) != std::end(names);
}

/// {"name", "arguments"} inside {"type": "function", "function": ...}.
ordered_json wrap(ordered_json function) {
  return {{"type", "function"}, {"function", std::move(function)}};
}

void check_arguments(ordered_json& call, const std::string& place) {
  const std::string field =
      place + (find(call, "function") != nullptr ? ".function.arguments" : ".arguments");
  const ordered_json* arguments = arguments_of(call);
  if (arguments == nullptr || !arguments->is_string()) return;
  const std::string& source = arguments->get_ref<const std::string&>();
  if (text::trim(source).empty()) return;  // as OpenAI writes a call without arguments
  const ordered_json value = parse_json_field(source, field);
  if (!value.is_object()) {
    fail(field, "is JSON text of type {}, expected an object", json_text::type_name(value));
  }
}

}  // namespace

bool is_call_role(const std::string& role) {
  return is_one_of(role,
                   {"function_call", "function-call", "tool_call", "tool-call", "tool_calls"});
}

bool is_answer_role(const std::string& role) {
  return is_one_of(role, {"tool", "observation", "tool_response", "tool-response",
                          "function_response", "function-response", "function"});
}

ordered_json* arguments_of(ordered_json& call) {
  if (!call.is_object()) return nullptr;
  if (const auto function = call.find("function"); function != call.end()) {
    return function->is_object() ? arguments_of(*function) : nullptr;
  }
  const auto arguments = call.find("arguments");
  return arguments == call.end() || arguments->is_null() ? nullptr : &*arguments;
}

ordered_json parse_calls(const ordered_json& value, const std::string& field) {
  ordered_json calls = value;
  if (value.is_string()) calls = parse_json_field(value.get_ref<const std::string&>(), field);
  if (!calls.is_array()) calls = ordered_json::array({std::move(calls)});
  for (std::size_t i = 0; i < calls.size(); ++i) {
    const std::string place = calls.size() > 1 ? fmt::format("{}[{}]", field, i) : field;
    ordered_json& call = calls[i];
    if (!call.is_object()) {
      fail(place, "is a JSON {}, expected a call {{\"name\": ..., \"arguments\": {{...}}}}",
           json_text::type_name(call));
    }
    if (find(call, "function") == nullptr) call = wrap(std::move(call));
    const ordered_json& function = call["function"];
    if (!function.is_object() || find(function, "name") == nullptr) {
      fail(place, "names no tool: expected {{\"name\": ..., \"arguments\": {{...}}}}");
    }
    check_arguments(call, place);
  }
  return calls;
}

void normalize_calls(ordered_json& message, const std::string& place) {
  if (const ordered_json* call = find(message, "function_call")) {
    if (find(message, "tool_calls") != nullptr) {
      fail(place + ".function_call", "stands beside 'tool_calls'; leave one of them out");
    }
    ordered_json calls = parse_calls(*call, place + ".function_call");
    message.erase("function_call");
    message["tool_calls"] = std::move(calls);
    return;
  }
  if (!message.contains("tool_calls")) return;
  const std::string field = place + ".tool_calls";
  ordered_json& calls = message["tool_calls"];
  if (calls.is_string()) {
    ordered_json parsed = parse_json_field(calls.get_ref<const std::string&>(), field);
    calls = std::move(parsed);
  }
  if (!calls.is_array()) {
    fail(field, "is a JSON {}, expected a list", json_text::type_name(calls));
  }
  for (std::size_t i = 0; i < calls.size(); ++i) {
    check_arguments(calls[i], fmt::format("{}[{}]", field, i));
  }
}

}  // namespace heddle::data
