#include "serve/openai/messages.h"

#include <limits>
#include <utility>

#include "base/json.h"
#include "data/readers/tool_calls.h"

namespace heddle::serve::openai {
namespace {

/// A text or parts of text; null where `may_be_absent`.
Json take_content(Fields& message, bool may_be_absent) {
  const Json content = message.take("content");
  const std::string field = message.full("content");
  if (content.is_string() || (content.is_null() && may_be_absent)) return content;
  if (!content.is_array())
    throw_field(field, "is {}: expected a text or a list of parts", json::shown(content));
  Json parts = Json::array();
  for (std::size_t i = 0; i < content.size(); ++i) {
    Fields part(content[i], fmt::format("{}[{}].", field, i));
    const std::string type = part.text("type").value_or("");
    if (type != "text")
      throw_field(part.full("type"), "is '{}': this model reads parts of type 'text' only", type);
    const auto text = part.text("text");
    if (!text) throw_field(part.full("text"), "is missing");
    part.finish();
    parts.push_back({{"type", "text"}, {"text", *text}});
  }
  return parts;
}

Json take_message(const Json& given, std::size_t index) {
  const std::string place = fmt::format("messages[{}]", index);
  Fields fields(given, place + ".");
  std::string role = fields.text("role").value_or("");
  if (role == "developer") role = "system";  // The name of newer models for the same thing.
  const bool is_assistant = role == "assistant";
  if (role != "system" && role != "user" && role != "tool" && !is_assistant) {
    throw_field(place + ".role", "is '{}': expected system, developer, user, assistant or tool",
                role);
  }
  Json message = {{"role", role}};
  if (Json content = take_content(fields, is_assistant); !content.is_null())
    message["content"] = std::move(content);
  if (const auto name = fields.text("name")) message["name"] = *name;
  if (role == "tool") {
    if (const auto id = fields.text("tool_call_id")) message["tool_call_id"] = *id;
  }
  if (is_assistant) {
    auto reasoning = fields.text("reasoning_content");
    const auto other = fields.text("reasoning");  // Newer clients write this name.
    if (!reasoning) reasoning = other;
    if (reasoning) message["reasoning_content"] = *reasoning;
    for (const char* key : {"tool_calls", "function_call"}) {
      if (Json calls = fields.take(key); !calls.is_null()) message[key] = std::move(calls);
    }
    data::normalize_calls(message, place);
    if (!message.contains("content") && !message.contains("tool_calls"))
      throw_field(place + ".content", "is missing, and there are no 'tool_calls'");
  }
  // OpenAI's own answers have it; an empty one says nothing.
  fields.only("annotations", Json::array(), "leave it out");
  fields.finish();
  return message;
}

Json take_tools(Fields& fields) {
  const Json tools = fields.take("tools");
  if (tools.is_null()) return tools;
  if (!tools.is_array()) throw_field("tools", "is {}: expected a list", json::shown(tools));
  for (std::size_t i = 0; i < tools.size(); ++i) {
    const std::string place = fmt::format("tools[{}].", i);
    Fields tool(tools[i], place);
    if (tool.text("type").value_or("function") != "function")
      throw_field(place + "type", "is not served: expected 'function'");
    Fields function(tool.take("function"), place + "function.");
    if (function.text("name").value_or("").empty())
      throw_field(place + "function.name", "is missing");
    if (const Json given = function.take("parameters"); !given.is_null() && !given.is_object())
      throw_field(place + "function.parameters",
                  "is {}: expected a JSON schema, which is an object", json::shown(given));
  }
  return tools.empty() ? Json() : tools;
}

bool has_tool(const Json& tools, const std::string& name) {
  for (const Json& tool : tools) {
    if (tool["function"]["name"] == name) return true;
  }
  return false;
}

}  // namespace

data::Row take_conversation(Fields& fields) {
  const Json messages = fields.take("messages");
  if (!messages.is_array() || messages.empty())
    throw_field("messages", "is {}: expected a list of messages", json::shown(messages));
  data::Row row;
  row.form = data::Row::Form::kConversation;
  row.format = data::RowFormat::kMessages;
  row.messages = Json::array();
  for (std::size_t i = 0; i < messages.size(); ++i)
    row.messages.push_back(take_message(messages[i], i));
  row.message_weights.assign(messages.size(), std::numeric_limits<double>::quiet_NaN());
  row.tools = take_tools(fields);
  row.template_variables = fields.take("chat_template_kwargs");
  if (!row.template_variables.is_null() && !row.template_variables.is_object())
    throw_field("chat_template_kwargs", "is {}: expected an object",
                json::shown(row.template_variables));
  for (const char* given :
       {"messages", "tools", "add_generation_prompt", "continue_final_message"}) {
    if (row.template_variables.contains(given))
      throw_field(fmt::format("chat_template_kwargs.{}", given),
                  "is a field of the request: put it beside 'chat_template_kwargs'");
  }
  return row;
}

ToolChoice take_tool_choice(Fields& fields, const Json& tools) {
  ToolChoice choice;
  choice.has_parallel = fields.boolean("parallel_tool_calls").value_or(true);
  const Json given = fields.take("tool_choice");
  if (given.is_null()) return choice;
  if (given == "none") {
    choice.kind = ToolChoice::Kind::kNone;
    return choice;
  }
  if (given == "auto") return choice;
  if (tools.is_null()) throw_field("tool_choice", "needs 'tools'");
  if (given == "required") {
    choice.kind = ToolChoice::Kind::kRequired;
    return choice;
  }
  if (given.is_string()) {
    throw_field("tool_choice",
                "is {}: expected auto, none, required or an object that names a "
                "function",
                json::shown(given));
  }
  Fields named(given, "tool_choice.");
  named.only("type", "function", "expected 'function'");
  Fields function(named.take("function"), "tool_choice.function.");
  choice.kind = ToolChoice::Kind::kNamed;
  choice.name = function.text("name").value_or("");
  if (!has_tool(tools, choice.name))
    throw_field("tool_choice.function.name", "is '{}': no tool has that name", choice.name);
  return choice;
}

}  // namespace heddle::serve::openai
