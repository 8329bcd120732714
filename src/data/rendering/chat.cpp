#include "data/rendering/chat.h"

#include <utility>

#include "base/errors.h"
#include "base/text.h"
#include "data/jinja/builtins.h"
#include "data/json/json_text.h"
#include "data/readers/tool_calls.h"

namespace heddle::data {
namespace {

using nlohmann::ordered_json;

// Private-use characters: Python's repr() escapes them, so a part that is shown as a literal is not
// taken for its text.
constexpr const char* kFirst = "\xee\x80\x80one\xee\x80\x81";
constexpr const char* kSecond = "\xee\x80\x80two\xee\x80\x81";
constexpr std::size_t kLongestArguments = std::size_t{64} << 20;

ordered_json text_part(const std::string& text) { return {{"type", "text"}, {"text", text}}; }

ordered_json message_of(const char* role, ordered_json content) {
  return {{"role", role}, {"content", std::move(content)}};
}

ordered_json call_of(ordered_json arguments) {
  const ordered_json call = {{"id", "call00001"},
                             {"type", "function"},
                             {"function", {{"name", "f"}, {"arguments", std::move(arguments)}}}};
  return {{"role", "assistant"}, {"content", ""}, {"tool_calls", ordered_json::array({call})}};
}

}  // namespace

Chat::Chat(const std::string& source, const std::string& name, ordered_json variables)
    : template_(ChatTemplate::parse(source, name)), variables_(std::move(variables)) {
  // The user's form first: conversations that show the others' begin with a user.
  for (const Role role : {kUser, kAssistant, kSystem}) learn_content(role);
  learn_arguments();
  learn_content(kTool);
}

Chat::Role Chat::role_of(const ordered_json& message) {
  const auto& role = message["role"].get_ref<const std::string&>();
  return role == "assistant"                       ? kAssistant
         : role == "system" || role == "developer" ? kSystem
         : role == "tool"                          ? kTool
                                                   : kUser;
}

bool Chat::shows(ordered_json before, const ordered_json& last,
                 std::initializer_list<std::string> words) const {
  ordered_json messages = adapted(std::move(before));
  messages.push_back(last);
  ChatTemplate::Options options;
  options.variables = variables_;
  try {
    const std::string text = template_.render(messages, options).text;
    std::size_t at = 0;
    for (const std::string& word : words) {
      at = text.find(word, at);
      if (at == std::string::npos) return false;
      at += word.size();
    }
    return true;
  } catch (const DataError&) {
    return false;
  }
}

void Chat::learn_content(Role role) {
  static constexpr const char* kNames[] = {"user", "assistant", "system", "tool"};
  const char* name = kNames[role];
  ordered_json before = ordered_json::array();
  if (role == kAssistant || role == kTool) before.push_back(message_of("user", "x"));
  if (role == kTool) before.push_back(call_of(ordered_json::object()));
  const ordered_json parts = ordered_json::array({text_part(kFirst), text_part(kSecond)});
  Content learnt;
  learnt.text = shows(before, message_of(name, kFirst), {kFirst});
  learnt.parts = shows(before, message_of(name, parts), {kFirst});
  ordered_json absent = role == kAssistant ? call_of(ordered_json::object()) : message_of(name, "");
  absent.erase("content");
  learnt.absent = shows(before, absent, {});
  content_[role] = learnt;
}

void Chat::learn_arguments() {
  const ordered_json user = ordered_json::array({message_of("user", "x")});
  const std::string text = fmt::format("{{\"{}\": \"{}\"}}", kFirst, kSecond);
  text_arguments_ = object_arguments_ = true;
  const bool text_shown = shows(user, call_of(text), {text});
  ordered_json object = ordered_json::object();
  object[kFirst] = kSecond;
  const bool object_shown = shows(user, call_of(object), {kFirst, kSecond});
  text_arguments_ = text_shown;
  object_arguments_ = object_shown;
}

void Chat::adapt_content(ordered_json& message) const {
  const Content& reads = content_[role_of(message)];
  const auto content = message.find("content");
  if (content == message.end()) {
    if (!reads.absent) message["content"] = "";
  } else if (content->is_string()) {
    if (!reads.text && reads.parts) {
      *content = ordered_json::array({text_part(content->get<std::string>())});
    }
  } else if (!reads.parts && reads.text) {
    std::string joined;
    for (const ordered_json& part : *content) joined += part["text"].get_ref<const std::string&>();
    *content = joined;
  }
}

void Chat::adapt_arguments(ordered_json& message) const {
  const auto calls = message.find("tool_calls");
  if (calls == message.end() || !calls->is_array()) return;
  for (ordered_json& call : *calls) {
    ordered_json* arguments = arguments_of(call);
    if (arguments == nullptr) continue;
    if (arguments->is_string() && !text_arguments_ && object_arguments_) {
      const std::string source = arguments->get<std::string>();
      *arguments = text::trim(source).empty() ? ordered_json::object() : json_text::parse(source);
    } else if (arguments->is_object() && text_arguments_ && !object_arguments_) {
      *arguments = jinja::to_json(jinja::Value::from_json(*arguments), {}, kLongestArguments);
    }
  }
}

ordered_json Chat::adapted(ordered_json messages) const {
  for (ordered_json& message : messages) {
    adapt_content(message);
    adapt_arguments(message);
  }
  return messages;
}

}  // namespace heddle::data
