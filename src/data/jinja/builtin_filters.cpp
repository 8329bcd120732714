#include <algorithm>
#include <array>
#include <charconv>
#include <cmath>

#include "data/jinja/interpreter.h"
#include "data/jinja/python_text.h"
#include "data/tokenizer/utf8.h"

namespace heddle::data::jinja {
namespace {

using Kind = Value::Kind;

/// What a filter works with.
struct Call {
  Interpreter& interpreter;
  const std::string& name;
  const Value& subject;
  const CallArguments& arguments;

  std::string text() const { return to_text(subject, interpreter.max_bytes()); }
  ArgumentReader read(std::initializer_list<const char*> names) const {
    return {name, arguments, names};
  }
};

void need_defined(const Call& call) {
  if (call.subject.is_undefined()) call.interpreter.fail_undefined(call.subject.as_undefined());
}

/// Follows "a.b.0" from an item; keys come before methods, as in a subscript.
Value dotted(Interpreter& interpreter, Value item, const Value& path, const Value* otherwise) {
  if (path.is_integral()) {
    item = interpreter.item(item, path);
  } else {
    for (const std::string& part :
         python_text::split(to_text(path, interpreter.max_bytes()), ".", -1, false)) {
      std::int64_t index = 0;
      const auto result = std::from_chars(part.data(), part.data() + part.size(), index);
      const bool is_index = !part.empty() && part[0] != '-' && result.ec == std::errc() &&
                            result.ptr == part.data() + part.size();
      item = interpreter.item(item, is_index ? Value::integer(index) : Value::string(part));
      if (item.is_undefined() && otherwise != nullptr) item = *otherwise;
    }
  }
  return item;
}

/// What sorting compares by: an attribute or several, without regard to case unless asked.
Value sort_key(Interpreter& interpreter, const Value& item, const Value* attribute,
               bool case_sensitive) {
  const auto fold = [&](Value value) {
    return !case_sensitive && value.is_string()
               ? Value::string(python_text::lower(value.as_string()))
               : value;
  };
  if (attribute == nullptr || attribute->is_none()) return fold(item);
  if (!attribute->is_string() || attribute->as_string().find(',') == std::string::npos) {
    return fold(dotted(interpreter, item, *attribute, nullptr));
  }
  Values keys;
  for (std::string& part : python_text::split(attribute->as_string(), ",", -1, false)) {
    keys.push_back(fold(dotted(interpreter, item, Value::string(std::move(part)), nullptr)));
  }
  return Value::list(std::move(keys));
}

Values sorted(Interpreter& interpreter, Values items, const Value* attribute, bool case_sensitive,
              bool reverse) {
  std::vector<std::pair<Value, Value>> keyed;
  keyed.reserve(items.size());
  std::uint64_t cost = 1;
  for (Value& item : items) {
    keyed.emplace_back(sort_key(interpreter, item, attribute, case_sensitive), item);
    cost += 8 + Interpreter::cost(keyed.back().first) * 8;
  }
  interpreter.work(cost);
  std::stable_sort(keyed.begin(), keyed.end(), [&](const auto& a, const auto& b) {
    return reverse ? less(b.first, a.first) : less(a.first, b.first);
  });
  for (std::size_t i = 0; i < items.size(); ++i) items[i] = std::move(keyed[i].second);
  return items;
}

Value filter_abs(const Call& call) {
  need_defined(call);
  if (!call.subject.is_number())
    throw TypeError{fmt::format("bad operand type for abs(): '{}'", call.subject.type_name())};
  if (!call.subject.is_integral()) return Value::real(std::fabs(call.subject.as_double()));
  return call.subject.as_int() < 0 ? subtract(Value::integer(0), call.subject)
                                   : Value::integer(call.subject.as_int());
}

Value filter_attr(const Call& call) {
  const auto arguments = call.read({"name"});
  const std::string name = to_text(arguments.at(0), call.interpreter.max_bytes());
  // Attributes only, never keys.
  if (call.subject.is_dict() && !has_method(call.subject, name))
    return Value::undefined(nullptr, true);
  const Value found = call.interpreter.attribute(call.subject, name);
  return found.is_undefined() ? Value::undefined(nullptr, true) : found;
}

Value filter_batch(const Call& call) {
  const auto arguments = call.read({"linecount", "fill_with"});
  const std::int64_t size = arguments.integer(0, 0);
  if (size <= 0) throw TypeError{"batch() needs a positive linecount"};
  Values batches, batch;
  const Values items = iterate(call.subject);
  for (const Value& item : items) {
    batch.push_back(item);
    if (static_cast<std::int64_t>(batch.size()) == size)
      batches.push_back(Value::list(std::exchange(batch, {})));
  }
  if (!batch.empty()) {
    if (arguments.has(1) && !arguments.at(1).is_none()) {
      call.interpreter.work(static_cast<std::uint64_t>(size));
      batch.resize(static_cast<std::size_t>(size), arguments.at(1));
    }
    batches.push_back(Value::list(std::move(batch)));
  }
  return Value::iterator(std::move(batches));
}

Value filter_capitalize(const Call& call) {
  return Value::string(python_text::capitalize(call.text()));
}

Value filter_center(const Call& call) {
  CallArguments arguments = call.arguments;
  if (arguments.positional.empty() && arguments.named.empty())
    arguments.positional.push_back(Value::integer(80));
  return call_method(call.interpreter, Value::string(call.text()), "center", arguments);
}

Value filter_default(const Call& call) {
  const auto arguments = call.read({"default_value", "boolean"});
  const bool replace =
      call.subject.is_undefined() || (arguments.boolean(1, false) && !call.subject.truthy());
  if (!replace) return call.subject;
  return arguments.has(0) ? arguments.at(0) : Value::string("");
}

Value filter_dictsort(const Call& call) {
  const auto arguments = call.read({"case_sensitive", "by", "reverse"});
  need_defined(call);
  if (!call.subject.is_dict())
    throw TypeError{fmt::format("dictsort() needs a mapping, not {}", call.subject.type_name())};
  const std::string by = arguments.string(1).value_or("key");
  if (by != "key" && by != "value")
    throw TypeError{"You can only sort by either \"key\" or \"value\""};
  Values pairs;
  for (const auto& [key, value] : call.subject.as_dict().items)
    pairs.push_back(Value::tuple({key, value}));
  const Value index = Value::integer(by == "key" ? 0 : 1);
  return Value::list(sorted(call.interpreter, std::move(pairs), &index, arguments.boolean(0, false),
                            arguments.boolean(2, false)));
}

Value filter_first(const Call& call) {
  call.read({});
  if (call.subject.is(Kind::kIterator)) {
    IteratorData& data = call.subject.as_iterator();
    return data.next < data.items.size() ? data.items[data.next++] : Value::undefined();
  }
  const Values items = iterate(call.subject);
  return items.empty() ? Value::undefined() : items.front();
}

/// float(text) of Python; false if it is none.
bool parse_float(std::string_view text, double& value) {
  text = python_text::strip(text);
  std::string digits;
  for (std::size_t i = 0; i < text.size(); ++i) {
    if (text[i] == '_' && i > 0 && i + 1 < text.size() && std::isdigit(text[i - 1]) &&
        std::isdigit(text[i + 1]))
      continue;
    digits += text[i];
  }
  if (digits.starts_with('+')) digits.erase(0, 1);
  if (digits.empty() || digits.starts_with('+')) return false;
  const auto result = std::from_chars(digits.data(), digits.data() + digits.size(), value);
  return result.ec == std::errc() && result.ptr == digits.data() + digits.size();
}

bool parse_integer(std::string_view text, int base, std::int64_t& value) {
  text = python_text::strip(text);
  std::string digits;
  for (std::size_t i = 0; i < text.size(); ++i) {
    if (text[i] == '_' && i > 0 && i + 1 < text.size() && std::isxdigit(text[i - 1]) &&
        std::isxdigit(text[i + 1]))
      continue;
    digits += text[i];
  }
  if (digits.starts_with('+')) digits.erase(0, 1);
  if (digits.empty() || digits.starts_with('+')) return false;
  const bool negative = digits[0] == '-';
  const std::size_t at = negative ? 1 : 0;
  if (digits.size() > at + 2 && digits[at] == '0') {
    const char mark = static_cast<char>(digits[at + 1] | 0x20);
    const int marked = mark == 'x' ? 16 : mark == 'o' ? 8 : mark == 'b' ? 2 : 0;
    if (marked != 0 && marked == base) digits.erase(at, 2);
  }
  const auto result = std::from_chars(digits.data(), digits.data() + digits.size(), value, base);
  return result.ec == std::errc() && result.ptr == digits.data() + digits.size();
}

Value filter_float(const Call& call) {
  const auto arguments = call.read({"default"});
  double value = 0;
  if (call.subject.is_number()) return Value::real(call.subject.as_double());
  if (call.subject.is_string() && parse_float(call.subject.as_string(), value))
    return Value::real(value);
  if (call.subject.is_undefined()) need_defined(call);
  return arguments.has(0) ? arguments.at(0) : Value::real(0);
}

Value filter_int(const Call& call) {
  const auto arguments = call.read({"default", "base"});
  const Value otherwise = arguments.has(0) ? arguments.at(0) : Value::integer(0);
  const auto truncate = [&](double value) {
    if (!std::isfinite(value)) return otherwise;
    if (std::fabs(value) >= 9.2e18) throw TypeError{"an integer needs more than 64 bits"};
    return Value::integer(static_cast<std::int64_t>(value));
  };
  if (call.subject.is_integral()) return Value::integer(call.subject.as_int());
  if (call.subject.is(Kind::kFloat)) return truncate(call.subject.as_double());
  need_defined(call);
  if (!call.subject.is_string()) return otherwise;
  const std::int64_t base = arguments.integer(1, 10);
  if (base < 2 || base > 36) throw TypeError{"int() base must be >= 2 and <= 36"};
  std::int64_t value = 0;
  if (parse_integer(call.subject.as_string(), static_cast<int>(base), value))
    return Value::integer(value);
  double real = 0;
  if (parse_float(call.subject.as_string(), real)) return truncate(real);
  return otherwise;
}

Value filter_format(const Call& call) {
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

Value filter_indent(const Call& call) {
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

Value filter_items(const Call& call) {
  call.read({});
  Values pairs;
  if (!call.subject.is_undefined()) {
    if (!call.subject.is_dict()) throw TypeError{"Can only get item pairs from a mapping."};
    for (const auto& [key, value] : call.subject.as_dict().items)
      pairs.push_back(Value::tuple({key, value}));
  }
  return Value::iterator(std::move(pairs));
}

Value filter_join(const Call& call) {
  const auto arguments = call.read({"d", "attribute"});
  const std::string separator =
      arguments.has(0) ? to_text(arguments.at(0), call.interpreter.max_bytes()) : "";
  TextSink out(call.interpreter.max_bytes());
  bool first = true;
  for (Value& item : iterate(call.subject)) {
    if (!first) out.add(separator);
    first = false;
    if (arguments.has(1) && !arguments.at(1).is_none())
      item = dotted(call.interpreter, item, arguments.at(1), nullptr);
    out.add(to_text(item, call.interpreter.max_bytes()));
  }
  return Value::string(out.take());
}

Value filter_last(const Call& call) {
  call.read({});
  if (call.subject.is(Kind::kIterator)) throw TypeError{"'generator' object is not reversible"};
  const Values items = iterate(call.subject);
  return items.empty() ? Value::undefined() : items.back();
}

Value filter_length(const Call& call) {
  call.read({});
  return Value::integer(length(call.subject));
}

Value filter_list(const Call& call) {
  call.read({});
  return Value::list(iterate(call.subject));
}

Value filter_lower(const Call& call) { return Value::string(python_text::lower(call.text())); }
Value filter_upper(const Call& call) { return Value::string(python_text::upper(call.text())); }
Value filter_string(const Call& call) { return Value::string(call.text()); }

Value filter_map(const Call& call) {
  Values out;
  if (!call.subject.truthy())
    return Value::iterator({});  // Jinja asks before it iterates: None is empty here
  const CallArguments& given = call.arguments;
  if (given.positional.empty()) {
    const auto arguments = call.read({"attribute", "default"});
    const Value& attribute = arguments.at(0);
    const Value* otherwise = arguments.has(1) ? &arguments.at(1) : nullptr;
    for (const Value& item : iterate(call.subject)) {
      out.push_back(dotted(call.interpreter, item, attribute, otherwise));
    }
  } else {
    const std::string filter = to_text(given.positional[0], call.interpreter.max_bytes());
    if (!is_filter(filter)) throw TypeError{fmt::format("filter '{}' is not supported", filter)};
    CallArguments rest{{given.positional.begin() + 1, given.positional.end()}, given.named};
    for (const Value& item : iterate(call.subject)) {
      out.push_back(apply_filter(call.interpreter, filter, item, rest));
    }
  }
  return Value::iterator(std::move(out));
}

Value extreme(const Call& call, bool largest) {
  const auto arguments = call.read({"case_sensitive", "attribute"});
  const Value* attribute = arguments.has(1) ? &arguments.at(1) : nullptr;
  Value best = Value::undefined(), best_key;
  bool first = true;
  for (const Value& item : iterate(call.subject)) {
    Value key = sort_key(call.interpreter, item, attribute, arguments.boolean(0, false));
    call.interpreter.work(Interpreter::cost(key));
    if (first || (largest ? less(best_key, key) : less(key, best_key))) {
      best = item;
      best_key = std::move(key);
    }
    first = false;
  }
  return best;
}
Value filter_max(const Call& call) { return extreme(call, true); }
Value filter_min(const Call& call) { return extreme(call, false); }

/// select, reject, selectattr, rejectattr.
Value choose(const Call& call, bool by_attribute, bool wanted) {
  if (!call.subject.truthy()) return Value::iterator({});
  const CallArguments& given = call.arguments;
  std::size_t used = 0;
  Value attribute;
  if (by_attribute) {
    if (given.positional.empty())
      throw TypeError{fmt::format("Missing parameter for attribute name of {}()", call.name)};
    attribute = given.positional[used++];
  }
  std::string test;
  if (used < given.positional.size())
    test = to_text(given.positional[used++], call.interpreter.max_bytes());
  if (!test.empty() && !is_test(test))
    throw TypeError{fmt::format("test '{}' is not supported", test)};
  const CallArguments rest{
      {given.positional.begin() + static_cast<std::ptrdiff_t>(used), given.positional.end()},
      given.named};
  Values out;
  for (const Value& item : iterate(call.subject)) {
    const Value value = by_attribute ? dotted(call.interpreter, item, attribute, nullptr) : item;
    const bool holds =
        test.empty() ? value.truthy() : apply_test(call.interpreter, test, value, rest);
    if (holds == wanted) out.push_back(item);
  }
  return Value::iterator(std::move(out));
}
Value filter_select(const Call& call) { return choose(call, false, true); }
Value filter_reject(const Call& call) { return choose(call, false, false); }
Value filter_selectattr(const Call& call) { return choose(call, true, true); }
Value filter_rejectattr(const Call& call) { return choose(call, true, false); }

Value filter_replace(const Call& call) {
  const auto arguments = call.read({"old", "new", "count"});
  CallArguments method;
  method.positional = {Value::string(to_text(arguments.at(0), call.interpreter.max_bytes())),
                       Value::string(to_text(arguments.at(1), call.interpreter.max_bytes())),
                       Value::integer(arguments.integer(2, -1))};
  return call_method(call.interpreter, Value::string(call.text()), "replace", method);
}

Value filter_reverse(const Call& call) {
  call.read({});
  if (call.subject.is_string()) {
    std::u32string code_points = python_text::to_code_points(call.subject.as_string());
    std::reverse(code_points.begin(), code_points.end());
    return Value::string(python_text::from_code_points(code_points));
  }
  Values items = iterate(call.subject);
  std::reverse(items.begin(), items.end());
  return call.subject.is(Kind::kIterator) ? Value::list(std::move(items))
                                          : Value::iterator(std::move(items));
}

Value filter_round(const Call& call) {
  const auto arguments = call.read({"precision", "method"});
  need_defined(call);
  const std::string method = arguments.string(1).value_or("common");
  if (method != "common" && method != "ceil" && method != "floor") {
    throw TypeError{"method must be common, ceil or floor"};
  }
  if (!call.subject.is_number())
    throw TypeError{fmt::format("round() needs a number, not {}", call.subject.type_name())};
  const std::int64_t precision = arguments.integer(0, 0);
  if (precision < -300 || precision > 300) throw TypeError{"round() precision is out of range"};
  const double value = call.subject.as_double();
  if (method == "common") {
    if (call.subject.is_integral()) {
      if (precision >= 0) return Value::integer(call.subject.as_int());
      const double step = std::pow(10.0, static_cast<double>(-precision));
      return Value::integer(static_cast<std::int64_t>(std::nearbyint(value / step) * step));
    }
    if (!std::isfinite(value)) return call.subject;
    if (precision < 0) {
      const double step = std::pow(10.0, static_cast<double>(-precision));
      return Value::real(std::nearbyint(value / step) * step);
    }
    // Correctly rounded, half to even on the exact binary value, by way of the decimal digits.
    const std::string digits = fmt::format("{:.{}f}", value, precision);
    double rounded = value;
    std::from_chars(digits.data(), digits.data() + digits.size(), rounded);
    return Value::real(rounded);
  }
  const double scale = std::pow(10.0, static_cast<double>(precision));
  return Value::real((method == "ceil" ? std::ceil(value * scale) : std::floor(value * scale)) /
                     scale);
}

Value filter_safe(const Call& call) { return Value::string(call.text(), true); }

Value filter_sort(const Call& call) {
  const auto arguments = call.read({"reverse", "case_sensitive", "attribute"});
  const Value* attribute = arguments.has(2) ? &arguments.at(2) : nullptr;
  return Value::list(sorted(call.interpreter, iterate(call.subject), attribute,
                            arguments.boolean(1, false), arguments.boolean(0, false)));
}

Value filter_sum(const Call& call) {
  const auto arguments = call.read({"attribute", "start"});
  Value total = arguments.has(1) ? arguments.at(1) : Value::integer(0);
  for (Value& item : iterate(call.subject)) {
    if (arguments.has(0) && !arguments.at(0).is_none())
      item = dotted(call.interpreter, item, arguments.at(0), nullptr);
    if (item.is_string() || total.is_string()) throw TypeError{"sum() can't sum strings"};
    total = add(total, item, call.interpreter.max_bytes());
    call.interpreter.work(Interpreter::cost(total));
  }
  return total;
}

/// Upper case after white space, a hyphen or an opening bracket; lower case elsewhere.
Value filter_title(const Call& call) {
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

Value filter_tojson(const Call& call) {
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
    const Values pair = iterate(arguments.at(2));
    if (pair.size() != 2 || !pair[0].is_string() || !pair[1].is_string()) {
      throw TypeError{"tojson() separators must be two strings"};
    }
    style.item_separator = pair[0].as_string();
    style.key_separator = pair[1].as_string();
  }
  return Value::string(to_json(call.subject, style, call.interpreter.max_bytes()));
}

Value filter_trim(const Call& call) {
  const auto arguments = call.read({"chars"});
  const std::string text = call.text();
  const std::optional<std::string> chars = arguments.string(0);
  return Value::string(std::string(
      python_text::strip(text, chars ? std::optional<std::string_view>(*chars) : std::nullopt)));
}

Value filter_unique(const Call& call) {
  const auto arguments = call.read({"case_sensitive", "attribute"});
  const Value* attribute = arguments.has(1) ? &arguments.at(1) : nullptr;
  Values out, seen;
  for (const Value& item : iterate(call.subject)) {
    Value key = sort_key(call.interpreter, item, attribute, arguments.boolean(0, false));
    call.interpreter.work(seen.size() + 1);
    if (std::any_of(seen.begin(), seen.end(),
                    [&](const Value& other) { return equal(other, key); }))
      continue;
    seen.push_back(std::move(key));
    out.push_back(item);
  }
  return Value::iterator(std::move(out));
}

Value filter_wordcount(const Call& call) {
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

struct Filter {
  std::string_view name;
  Value (*apply)(const Call&);
};

/// Filters that leave the mark of `safe` on a text, as Python's methods of Markup do.
constexpr std::string_view kKeepMarkup[] = {"capitalize", "center", "indent", "lower",
                                            "reverse",    "string", "trim",   "upper"};

constexpr Filter kFilters[] = {
    {"abs", filter_abs},
    {"attr", filter_attr},
    {"batch", filter_batch},
    {"capitalize", filter_capitalize},
    {"center", filter_center},
    {"count", filter_length},
    {"d", filter_default},
    {"default", filter_default},
    {"dictsort", filter_dictsort},
    {"first", filter_first},
    {"float", filter_float},
    {"format", filter_format},
    {"indent", filter_indent},
    {"int", filter_int},
    {"items", filter_items},
    {"join", filter_join},
    {"last", filter_last},
    {"length", filter_length},
    {"list", filter_list},
    {"lower", filter_lower},
    {"map", filter_map},
    {"max", filter_max},
    {"min", filter_min},
    {"reject", filter_reject},
    {"rejectattr", filter_rejectattr},
    {"replace", filter_replace},
    {"reverse", filter_reverse},
    {"round", filter_round},
    {"safe", filter_safe},
    {"select", filter_select},
    {"selectattr", filter_selectattr},
    {"sort", filter_sort},
    {"string", filter_string},
    {"sum", filter_sum},
    {"title", filter_title},
    {"tojson", filter_tojson},
    {"trim", filter_trim},
    {"unique", filter_unique},
    {"upper", filter_upper},
    {"wordcount", filter_wordcount},
};

const Filter* find_filter(std::string_view name) {
  for (const Filter& filter : kFilters) {
    if (filter.name == name) return &filter;
  }
  return nullptr;
}

}  // namespace

bool is_filter(std::string_view name) { return find_filter(name) != nullptr; }

Value apply_filter(Interpreter& interpreter, const std::string& name, const Value& subject,
                   const CallArguments& arguments) {
  interpreter.work(1 + Interpreter::cost(subject));
  Value result = find_filter(name)->apply({interpreter, name, subject, arguments});
  if (result.is_string()) interpreter.built(result.as_string().size());
  if (subject.is_markup() && result.is_string() &&
      std::find(std::begin(kKeepMarkup), std::end(kKeepMarkup), name) != std::end(kKeepMarkup)) {
    return Value::string(result.as_string(), true);
  }
  return result;
}

}  // namespace heddle::data::jinja
