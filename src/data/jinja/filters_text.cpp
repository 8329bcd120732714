#include <algorithm>

#include "data/jinja/filter.h"
#include "data/jinja/python_text.h"
#include "data/tokenizer/utf8.h"

namespace heddle::data::jinja {
namespace {

Value filter_capitalize(const FilterCall& call) {
  return Value::string(python_text::capitalize(call.text()));
}

Value filter_center(const FilterCall& call) {
  CallArguments arguments = call.arguments;
  if (arguments.positional.empty() && arguments.named.empty())
    arguments.positional.push_back(Value::integer(80));
  return call_method(call.interpreter, Value::string(call.text()), "center", arguments);
}

Value filter_format(const FilterCall& call) {
  const Value format = call.subject.is_string() ? call.subject : Value::string(call.text());
  if (!call.arguments.named.empty()) {
    if (!call.arguments.positional.empty())
      throw TypeError{"can't handle positional and keyword arguments at the same time"};
    std::vector<std::pair<Value, Value>> items;
    for (const auto& [name, value] : call.arguments.named)
      items.emplace_back(Value::string(name), value);
    return format_percent(format, Value::dict(std::move(items)), call.interpreter.max_bytes());
  }
  return format_percent(format, Value::tuple(call.arguments.positional),
                        call.interpreter.max_bytes());
}

Value filter_indent(const FilterCall& call) {
  const auto arguments = call.read({"width", "first", "blank"});
  if (!call.subject.is_string()) {
    throw TypeError{fmt::format("indent() needs a string, not {}", call.subject.type_name())};
  }
  std::string indentation;
  if (arguments.has(0) && arguments.at(0).is_string()) {
    indentation = arguments.at(0).as_string();
  } else {
    const std::int64_t width = arguments.integer(0, 4);
    if (width > static_cast<std::int64_t>(call.interpreter.max_bytes()))
      throw TypeError{"indent() is too wide"};
    indentation.assign(static_cast<std::size_t>(std::max<std::int64_t>(0, width)), ' ');
  }
  const bool blank = arguments.boolean(2, false);
  const std::vector<std::string> lines = python_text::split_lines(call.text() + "\n", false);
  TextSink out(call.interpreter.max_bytes());
  if (arguments.boolean(1, false)) out.add(indentation);
  for (std::size_t i = 0; i < lines.size(); ++i) {
    if (i > 0) out.add("\n");
    if (i > 0 && (blank || !lines[i].empty())) out.add(indentation);
    out.add(lines[i]);
  }
  return Value::string(out.take());
}

Value filter_lower(const FilterCall& call) {
  return Value::string(python_text::lower(call.text()));
}

Value filter_upper(const FilterCall& call) {
  return Value::string(python_text::upper(call.text()));
}

Value filter_string(const FilterCall& call) { return Value::string(call.text()); }

Value filter_replace(const FilterCall& call) {
  const auto arguments = call.read({"old", "new", "count"});
  CallArguments method;
  method.positional = {Value::string(to_text(arguments.at(0), call.interpreter.max_bytes())),
                       Value::string(to_text(arguments.at(1), call.interpreter.max_bytes())),
                       Value::integer(arguments.integer(2, -1))};
  return call_method(call.interpreter, Value::string(call.text()), "replace", method);
}

Value filter_safe(const FilterCall& call) { return Value::string(call.text(), true); }

/// Upper case after white space, a hyphen or an opening bracket; lower case elsewhere.
Value filter_title(const FilterCall& call) {
  const std::string text = call.text();
  std::string out;
  bool at_start = true;
  for (std::size_t at = 0; at < text.size();) {
    const utf8::Decoded next = utf8::decode(text, at);
    const std::string_view character = std::string_view(text).substr(at, next.bytes);
    const bool separates = python_text::is_space(next.code_point) ||
                           (next.code_point < 0x80 &&
                            std::string_view("-({[<").find(static_cast<char>(next.code_point)) !=
                                std::string_view::npos);
    if (separates) {
      out += character;
      at_start = true;
    } else {
      out += at_start ? python_text::upper(character) : python_text::lower(character);
      at_start = false;
    }
    at += next.bytes;
  }
  return Value::string(std::move(out));
}

Value filter_tojson(const FilterCall& call) {
  const auto arguments = call.read({"ensure_ascii", "indent", "separators", "sort_keys"});
  JsonStyle style;
  style.ensure_ascii = arguments.boolean(0, false);
  style.sort_keys = arguments.boolean(3, false);
  if (arguments.has(1) && !arguments.at(1).is_none()) {
    if (arguments.at(1).is_string()) {
      style.indent_text = arguments.at(1).as_string();
    } else {
      style.indent = static_cast<int>(std::clamp<std::int64_t>(arguments.integer(1, 0), 0, 1000));
    }
    style.item_separator.assign(1, ',');
  }
  if (arguments.has(2) && !arguments.at(2).is_none()) {
    const Values pair = call.interpreter.items_of(arguments.at(2));
    if (pair.size() != 2 || !pair[0].is_string() || !pair[1].is_string()) {
      throw TypeError{"tojson() separators must be two strings"};
    }
    style.item_separator = pair[0].as_string();
    style.key_separator = pair[1].as_string();
  }
  call.interpreter.work(Interpreter::cost(call.subject));
  return Value::string(to_json(call.subject, style, call.interpreter.max_bytes()));
}

Value filter_trim(const FilterCall& call) {
  const auto arguments = call.read({"chars"});
  const std::string text = call.text();
  const std::optional<std::string> chars = arguments.string(0);
  return Value::string(std::string(
      python_text::strip(text, chars ? std::optional<std::string_view>(*chars) : std::nullopt)));
}

Value filter_wordcount(const FilterCall& call) {
  // Runs of word characters.
  std::int64_t words = 0;
  bool inside = false;
  const std::string text = call.text();
  for (std::size_t at = 0; at < text.size();) {
    const utf8::Decoded next = utf8::decode(text, at);
    const std::string_view character = std::string_view(text).substr(at, next.bytes);
    const bool is_word =
        character == "_" || python_text::all(character, python_text::Property::kAlnum);
    words += is_word && !inside;
    inside = is_word;
    at += next.bytes;
  }
  return Value::integer(words);
}

constexpr Filter kTextFilters[] = {
    {"capitalize", filter_capitalize},
    {"center", filter_center},
    {"format", filter_format},
    {"indent", filter_indent},
    {"lower", filter_lower},
    {"replace", filter_replace},
    {"safe", filter_safe},
    {"string", filter_string},
    {"title", filter_title},
    {"tojson", filter_tojson},
    {"trim", filter_trim},
    {"upper", filter_upper},
    {"wordcount", filter_wordcount},
};

}  // namespace

std::span<const Filter> text_filters() { return kTextFilters; }

}  // namespace heddle::data::jinja
