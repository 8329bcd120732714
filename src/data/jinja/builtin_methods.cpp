#include <algorithm>

#include "data/jinja/interpreter.h"
#include "data/jinja/python_text.h"
#include "data/tokenizer/utf8.h"

namespace heddle::data::jinja {
namespace {

using Kind = Value::Kind;
using python_text::Property;

struct MethodCall {
  Interpreter& interpreter;
  const Value& self;
  const std::string& name;
  const CallArguments& arguments;

  ArgumentReader read(std::initializer_list<const char*> names) const {
    return {name, arguments, names};
  }
  const std::string& text() const { return self.as_string(); }
};

struct Method {
  std::string_view name;
  Value (*call)(const MethodCall&);
};

std::optional<std::string_view> optional_view(const std::optional<std::string>& text) {
  return text ? std::optional<std::string_view>(*text) : std::nullopt;
}

Value strings(std::vector<std::string> parts, const MethodCall& call) {
  call.interpreter.work(parts.size());
  Values out;
  out.reserve(parts.size());
  for (std::string& part : parts) {
    call.interpreter.built(part.size());
    out.push_back(Value::string(std::move(part)));
  }
  return Value::list(std::move(out));
}

/// Counts the work of looking for `what` all over the text.
void count_search(const MethodCall& call, const Value& what) {
  call.interpreter.work(Interpreter::cost_of_finding(what, call.self));
}

std::string need_string(const ArgumentReader& arguments, int index) {
  arguments.at(index);
  const std::optional<std::string> text = arguments.string(index);
  if (!text) throw TypeError{"expected a string, found None"};
  return *text;
}

Value strip(const MethodCall& call,
            std::string_view (*how)(std::string_view, std::optional<std::string_view>)) {
  const std::optional<std::string> chars = call.read({"chars"}).string(0);
  return Value::string(std::string(how(call.text(), optional_view(chars))));
}

Value split(const MethodCall& call, bool from_right) {
  const auto arguments = call.read({"sep", "maxsplit"});
  const std::optional<std::string> separator = arguments.string(0);
  if (separator && separator->empty()) throw TypeError{"empty separator"};
  if (separator) count_search(call, arguments.at(0));
  return strings(python_text::split(call.text(), optional_view(separator), arguments.integer(1, -1),
                                    from_right),
                 call);
}

/// The part of the text that start and end, in characters, leave; and where it begins, in
/// characters.
std::pair<std::string_view, std::int64_t> window(const MethodCall& call,
                                                 const ArgumentReader& arguments, int first) {
  const std::string_view text = call.text();
  if (!arguments.has(first) && !arguments.has(first + 1)) return {text, 0};
  const auto count = static_cast<std::int64_t>(utf8::length(text));
  const auto clamp = [&](std::int64_t at) {
    return std::clamp<std::int64_t>(at < 0 ? std::max<std::int64_t>(at, -count) + count : at, 0,
                                    count);
  };
  const std::int64_t begin = clamp(arguments.integer(first, 0)),
                     end = clamp(arguments.integer(first + 1, count));
  std::size_t at = 0, from = 0;
  std::int64_t index = 0;
  for (; index < std::max(begin, end) && at < text.size(); ++index) {
    if (index == begin) from = at;
    at += utf8::decode(text, at).bytes;
  }
  if (begin >= end) return {std::string_view(), arguments.integer(first, 0) > count ? -1 : begin};
  return {text.substr(from, at - from), begin};
}

Value affix(const MethodCall& call, bool at_end) {
  const auto arguments = call.read({"prefix", "start", "end"});
  const auto [text, begin] = window(call, arguments, 1);
  const auto holds = [&, text = text, begin = begin](const Value& candidate) {
    if (!candidate.is_string()) {
      throw TypeError{fmt::format("{} first arg must be str or a tuple of str, not {}", call.name,
                                  candidate.type_name())};
    }
    if (begin < 0) return false;
    return at_end ? text.ends_with(candidate.as_string()) : text.starts_with(candidate.as_string());
  };
  const Value& what = arguments.at(0);
  if (what.is(Kind::kList) && what.as_list().form == ListData::Form::kTuple) {
    for (const Value& candidate : what.as_list().items) {
      if (holds(candidate)) return Value::boolean(true);
    }
    return Value::boolean(false);
  }
  return Value::boolean(holds(what));
}

Value find(const MethodCall& call, bool from_right, bool must_exist) {
  const auto arguments = call.read({"sub", "start", "end"});
  const std::string what = need_string(arguments, 0);
  count_search(call, arguments.at(0));
  const auto [text, begin] = window(call, arguments, 1);
  const std::size_t at = begin < 0    ? std::string_view::npos
                         : from_right ? text.rfind(what)
                                      : text.find(what);
  if (at == std::string_view::npos) {
    if (must_exist) throw TypeError{"substring not found"};
    return Value::integer(-1);
  }
  return Value::integer(begin + static_cast<std::int64_t>(utf8::length(text.substr(0, at))));
}

Value replace(const MethodCall& call) {
  const auto arguments = call.read({"old", "new", "count"});
  const std::string from = need_string(arguments, 0);
  count_search(call, arguments.at(0));
  std::string to = need_string(arguments, 1);
  if (call.self.is_markup()) to = escaped(arguments.at(1), call.interpreter.max_bytes());
  const std::int64_t most = arguments.integer(2, -1);
  // The result's largest size is checked before it is built.
  std::size_t count = from.empty() ? call.text().size() + 1 : 0;
  for (std::size_t at = 0; !from.empty() && (at = call.text().find(from, at)) != std::string::npos;
       at += from.size())
    ++count;
  if (most >= 0) count = std::min(count, static_cast<std::size_t>(most));
  if (to.size() > from.size() && count > call.interpreter.max_bytes() / (to.size() - from.size())) {
    throw TypeError{fmt::format("a text of more than {} bytes", call.interpreter.max_bytes())};
  }
  return Value::string(python_text::replace(call.text(), from, to, most));
}

Value justify(const MethodCall& call, int side) {
  const auto arguments = call.read({"width", "fillchar"});
  arguments.at(0);
  const std::string fill = arguments.string(1).value_or(" ");
  if (utf8::length(fill) != 1)
    throw TypeError{"The fill character must be exactly one character long"};
  const std::int64_t width = arguments.integer(0, 0);
  const auto length = static_cast<std::int64_t>(utf8::length(call.text()));
  if (width <= length) return call.self;
  if (width > static_cast<std::int64_t>(call.interpreter.max_bytes() / fill.size()))
    throw TypeError{"the width is too large"};
  const std::int64_t missing = width - length;
  // Python's str.center puts the odd space left if the width is odd.
  const std::int64_t left = side < 0 ? 0 : side > 0 ? missing : missing / 2 + (missing & width & 1);
  std::string out;
  for (std::int64_t i = 0; i < left; ++i) out += fill;
  out += call.text();
  for (std::int64_t i = left; i < missing; ++i) out += fill;
  return Value::string(std::move(out));
}

Value zfill(const MethodCall& call) {
  const std::int64_t width = call.read({"width"}).integer(0, 0);
  const auto length = static_cast<std::int64_t>(utf8::length(call.text()));
  if (width <= length) return call.self;
  if (width > static_cast<std::int64_t>(call.interpreter.max_bytes()))
    throw TypeError{"the width is too large"};
  std::string out = call.text();
  const bool has_sign = out.starts_with('+') || out.starts_with('-');
  return Value::string(out.insert(has_sign ? 1 : 0, static_cast<std::size_t>(width - length), '0'));
}

Value partition(const MethodCall& call, bool from_right) {
  const auto arguments = call.read({"sep"});
  const std::string separator = need_string(arguments, 0);
  count_search(call, arguments.at(0));
  if (separator.empty()) throw TypeError{"empty separator"};
  const std::string& text = call.text();
  const std::size_t at = from_right ? text.rfind(separator) : text.find(separator);
  if (at == std::string::npos) {
    return from_right ? Value::tuple({Value::string(""), Value::string(""), call.self})
                      : Value::tuple({call.self, Value::string(""), Value::string("")});
  }
  return Value::tuple({Value::string(text.substr(0, at)), Value::string(separator),
                       Value::string(text.substr(at + separator.size()))});
}

Value join(const MethodCall& call) {
  TextSink out(call.interpreter.max_bytes());
  bool first = true;
  const Values items = call.interpreter.items_of(call.read({"iterable"}).at(0));
  for (const Value& item : items) {
    if (!item.is_string())
      throw TypeError{
          fmt::format("sequence item: expected str instance, {} found", item.type_name())};
    if (!first) out.add(call.text());
    first = false;
    out.add(call.self.is_markup() ? escaped(item, call.interpreter.max_bytes()) : item.as_string());
  }
  return Value::string(out.take());
}

Value count(const MethodCall& call) {
  const auto arguments = call.read({"sub", "start", "end"});
  const std::string what = need_string(arguments, 0);
  count_search(call, arguments.at(0));
  const auto [text, begin] = window(call, arguments, 1);
  if (begin < 0) return Value::integer(0);
  if (what.empty()) return Value::integer(static_cast<std::int64_t>(utf8::length(text)) + 1);
  std::int64_t found = 0;
  for (std::size_t at = 0; (at = text.find(what, at)) != std::string_view::npos; at += what.size())
    ++found;
  return Value::integer(found);
}

Value expand_tabs(const MethodCall& call) {
  const std::int64_t size = call.read({"tabsize"}).integer(0, 8);
  if (size > 1000) throw TypeError{"tabsize is too large"};
  TextSink out(call.interpreter.max_bytes());
  std::int64_t column = 0;
  const std::string& text = call.text();
  for (std::size_t at = 0; at < text.size();) {
    const std::size_t bytes = utf8::decode(text, at).bytes;
    if (text[at] == '\t') {
      const std::int64_t spaces = size > 0 ? size - column % size : 0;
      out.add(std::string(static_cast<std::size_t>(spaces), ' '));
      column += spaces;
    } else {
      out.add(std::string_view(text).substr(at, bytes));
      column = text[at] == '\n' || text[at] == '\r' ? 0 : column + 1;
    }
    at += bytes;
  }
  return Value::string(out.take());
}

template <Property property>
Value has_property(const MethodCall& call) {
  call.read({});
  return Value::boolean(python_text::all(call.text(), property));
}

constexpr Method kStringMethods[] = {
    {"strip", [](const MethodCall& call) { return strip(call, python_text::strip); }},
    {"lstrip", [](const MethodCall& call) { return strip(call, python_text::strip_left); }},
    {"rstrip", [](const MethodCall& call) { return strip(call, python_text::strip_right); }},
    {"split", [](const MethodCall& call) { return split(call, false); }},
    {"rsplit", [](const MethodCall& call) { return split(call, true); }},
    {"splitlines",
     [](const MethodCall& call) {
       return strings(
           python_text::split_lines(call.text(), call.read({"keepends"}).boolean(0, false)), call);
     }},
    {"startswith", [](const MethodCall& call) { return affix(call, false); }},
    {"endswith", [](const MethodCall& call) { return affix(call, true); }},
    {"removeprefix",
     [](const MethodCall& call) {
       const std::string prefix = need_string(call.read({"prefix"}), 0);
       return call.text().starts_with(prefix) ? Value::string(call.text().substr(prefix.size()))
                                              : call.self;
     }},
    {"removesuffix",
     [](const MethodCall& call) {
       const std::string suffix = need_string(call.read({"suffix"}), 0);
       return call.text().ends_with(suffix)
                  ? Value::string(call.text().substr(0, call.text().size() - suffix.size()))
                  : call.self;
     }},
    {"find", [](const MethodCall& call) { return find(call, false, false); }},
    {"rfind", [](const MethodCall& call) { return find(call, true, false); }},
    {"index", [](const MethodCall& call) { return find(call, false, true); }},
    {"rindex", [](const MethodCall& call) { return find(call, true, true); }},
    {"count", count},
    {"replace", replace},
    {"join", join},
    {"partition", [](const MethodCall& call) { return partition(call, false); }},
    {"rpartition", [](const MethodCall& call) { return partition(call, true); }},
    {"upper",
     [](const MethodCall& call) { return Value::string(python_text::upper(call.text())); }},
    {"lower",
     [](const MethodCall& call) { return Value::string(python_text::lower(call.text())); }},
    {"capitalize",
     [](const MethodCall& call) { return Value::string(python_text::capitalize(call.text())); }},
    {"title",
     [](const MethodCall& call) { return Value::string(python_text::title(call.text())); }},
    {"swapcase",
     [](const MethodCall& call) { return Value::string(python_text::swapcase(call.text())); }},
    {"ljust", [](const MethodCall& call) { return justify(call, -1); }},
    {"rjust", [](const MethodCall& call) { return justify(call, 1); }},
    {"center", [](const MethodCall& call) { return justify(call, 0); }},
    {"zfill", zfill},
    {"expandtabs", expand_tabs},
    {"format",
     [](const MethodCall& call) {
       return format_braces(call.self, call.arguments, call.interpreter.max_bytes());
     }},
    {"isalpha", has_property<Property::kAlpha>},
    {"isdigit", has_property<Property::kDigit>},
    {"isdecimal", has_property<Property::kDecimal>},
    {"isnumeric", has_property<Property::kNumeric>},
    {"isalnum", has_property<Property::kAlnum>},
    {"isspace", has_property<Property::kSpace>},
    {"isascii", has_property<Property::kAscii>},
    {"islower",
     [](const MethodCall& call) { return Value::boolean(python_text::is_lower(call.text())); }},
    {"isupper",
     [](const MethodCall& call) { return Value::boolean(python_text::is_upper(call.text())); }},
    {"istitle",
     [](const MethodCall& call) { return Value::boolean(python_text::is_title(call.text())); }},
};

constexpr Method kDictMethods[] = {
    {"get",
     [](const MethodCall& call) {
       const auto arguments = call.read({"key", "default"});
       call.interpreter.work(Interpreter::cost_of_finding(arguments.at(0), call.self));
       const Value* found = call.self.as_dict().find(arguments.at(0));
       return found != nullptr ? *found : arguments.has(1) ? arguments.at(1) : Value::none();
     }},
    {"items",
     [](const MethodCall& call) {
       Values pairs;
       call.interpreter.work(call.self.as_dict().items.size());
       for (const auto& [key, value] : call.self.as_dict().items)
         pairs.push_back(Value::tuple({key, value}));
       return Value::view(std::move(pairs));
     }},
    {"keys",
     [](const MethodCall& call) { return Value::view(call.interpreter.items_of(call.self)); }},
    {"values",
     [](const MethodCall& call) {
       Values values;
       call.interpreter.work(call.self.as_dict().items.size());
       for (const auto& [key, value] : call.self.as_dict().items) values.push_back(value);
       return Value::view(std::move(values));
     }},
    {"copy", [](const MethodCall& call) { return call.self; }},
};

constexpr Method kListMethods[] = {
    {"index",
     [](const MethodCall& call) {
       const Values& items = call.self.as_list().items;
       const Value& what = call.read({"value"}).at(0);
       call.interpreter.work(Interpreter::cost_of_finding(what, call.self));
       for (std::size_t i = 0; i < items.size(); ++i) {
         if (equal(items[i], what)) return Value::integer(static_cast<std::int64_t>(i));
       }
       throw TypeError{"value is not in list"};
     }},
    {"count",
     [](const MethodCall& call) {
       const Value& what = call.read({"value"}).at(0);
       call.interpreter.work(Interpreter::cost_of_finding(what, call.self));
       std::int64_t found = 0;
       for (const Value& item : call.self.as_list().items) found += equal(item, what);
       return Value::integer(found);
     }},
    {"copy", [](const MethodCall& call) { return call.self; }},
};

const Method* find_method(const Value& self, std::string_view name) {
  const auto search = [&](const auto& methods) -> const Method* {
    for (const Method& method : methods) {
      if (method.name == name) return &method;
    }
    return nullptr;
  };
  switch (self.kind()) {
    case Kind::kString:
      return search(kStringMethods);
    case Kind::kDict:
      return search(kDictMethods);
    case Kind::kList: {
      if (self.as_list().form == ListData::Form::kView) return nullptr;
      const Method* found = search(kListMethods);
      return found != nullptr && name == "copy" && self.as_list().form == ListData::Form::kTuple
                 ? nullptr
                 : found;
    }
    default:
      return nullptr;
  }
}

/// The texts of a result as markup.
Value marked(const Value& value) {
  if (value.is_string()) return Value::string(value.as_string(), true);
  if (!value.is(Kind::kList)) return value;
  Values items;
  for (const Value& item : value.as_list().items) items.push_back(marked(item));
  return value.as_list().form == ListData::Form::kTuple ? Value::tuple(std::move(items))
                                                        : Value::list(std::move(items));
}

}  // namespace

bool has_method(const Value& self, std::string_view name) {
  return find_method(self, name) != nullptr;
}

bool is_forbidden_method(const Value& self, std::string_view name) {
  if (self.is_dict()) {
    for (const std::string_view forbidden : {"clear", "pop", "popitem", "setdefault", "update"}) {
      if (name == forbidden) return true;
    }
  }
  if (self.is(Kind::kList) && self.as_list().form == ListData::Form::kList) {
    for (const std::string_view forbidden :
         {"append", "clear", "extend", "insert", "pop", "remove", "reverse", "sort"}) {
      if (name == forbidden) return true;
    }
  }
  return false;
}

Value call_method(Interpreter& interpreter, const Value& self, const std::string& name,
                  const CallArguments& arguments) {
  interpreter.work(1 + (self.is_string() ? Interpreter::cost(self) : 0));
  Value result = find_method(self, name)->call({interpreter, self, name, arguments});
  if (result.is_string()) interpreter.built(result.as_string().size());
  return self.is_markup() ? marked(result) : result;
}

}  // namespace heddle::data::jinja
