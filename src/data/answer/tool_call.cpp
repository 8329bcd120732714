#include "data/answer/tool_call.h"

#include <utility>

#include "base/errors.h"
#include "base/text.h"
#include "data/answer/typed_value.h"
#include "data/json/json_text.h"

namespace heddle::data {
namespace {

using nlohmann::ordered_json;

constexpr std::string_view kFunction = "<function=", kFunctionEnd = "</function>";
constexpr std::string_view kParameter = "<parameter=", kParameterEnd = "</parameter>";

void skip_space(std::string_view& text) {
  text.remove_prefix(std::min(text.find_first_not_of(" \t\r\n"), text.size()));
}

bool skip(std::string_view& text, std::string_view word) {
  if (!text.starts_with(word)) return false;
  text.remove_prefix(word.size());
  return true;
}

/// The name up to `>`; nullopt where there is none.
std::optional<std::string_view> take_name(std::string_view& text) {
  const std::size_t end = text.find('>');
  if (end == std::string_view::npos || end == 0) return std::nullopt;
  const std::string_view name = text.substr(0, end);
  if (name.find('\n') != std::string_view::npos) return std::nullopt;
  text.remove_prefix(end + 1);
  return name;
}

/// The value up to the end tag that is followed by another parameter or the end of the function: a
/// value may itself hold the tag's text. One line break at each side belongs to the tags.
std::optional<std::string_view> take_value(std::string_view& text) {
  for (std::size_t end = text.find(kParameterEnd); end != std::string_view::npos;
       end = text.find(kParameterEnd, end + 1)) {
    std::string_view rest = text.substr(end + kParameterEnd.size());
    skip_space(rest);
    if (!rest.starts_with(kParameter) && !rest.starts_with(kFunctionEnd)) continue;
    std::string_view value = text.substr(0, end);
    skip(value, "\n");
    if (value.ends_with('\n')) value.remove_suffix(1);
    text = rest;
    return value;
  }
  return std::nullopt;
}

std::optional<ToolCall> parse_xml(std::string_view body, const ordered_json& tools) {
  skip_space(body);
  if (!skip(body, kFunction)) return std::nullopt;
  const auto name = take_name(body);
  if (!name) return std::nullopt;
  const ordered_json properties = properties_of(tools, *name);
  ordered_json arguments = ordered_json::object();
  skip_space(body);
  while (!skip(body, kFunctionEnd)) {
    if (!skip(body, kParameter)) return std::nullopt;
    const auto parameter = take_name(body);
    if (!parameter) return std::nullopt;
    const auto value = take_value(body);
    if (!value) return std::nullopt;
    const std::string key(*parameter);
    arguments[key] =
        typed_value(*value, properties.contains(key) ? properties[key] : ordered_json());
  }
  skip_space(body);
  if (!body.empty()) return std::nullopt;
  return ToolCall{std::string(*name), json_text::dump(arguments)};
}

std::optional<ToolCall> parse_json(std::string_view body) {
  ordered_json call;
  try {
    call = json_text::parse(text::trim(body));
  } catch (const DataError&) {
    return std::nullopt;  // The text is the model's: one that is no call is content.
  }
  if (!call.is_object() || !call.contains("name") || !call["name"].is_string()) return std::nullopt;
  ordered_json arguments = ordered_json::object();
  if (const auto given = call.find("arguments"); given != call.end()) arguments = *given;
  if (!arguments.is_object()) return std::nullopt;
  return ToolCall{call["name"].get<std::string>(), json_text::dump(arguments)};
}

}  // namespace

std::optional<ToolCall> parse_call(std::string_view body, CallSyntax syntax,
                                   const ordered_json& tools) {
  return syntax == CallSyntax::kXml ? parse_xml(body, tools) : parse_json(body);
}

bool can_begin_call(std::string_view body, CallSyntax syntax) {
  skip_space(body);
  const std::string_view start = syntax == CallSyntax::kXml ? kFunction : "{";
  return body.starts_with(start.substr(0, body.size()));
}

}  // namespace heddle::data
