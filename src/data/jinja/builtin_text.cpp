#include <algorithm>
#include <cmath>

#include "data/jinja/builtins.h"
#include "data/jinja/python_text.h"
#include "data/tokenizer/utf8.h"

namespace heddle::data::jinja {
namespace {

void repr(const Value& value, TextSink& out) {
  using Kind = Value::Kind;
  switch (value.kind()) {
    case Kind::kUndefined:
      out.add("Undefined");
      return;
    case Kind::kNone:
      out.add("None");
      return;
    case Kind::kBool:
      out.add(value.as_bool() ? "True" : "False");
      return;
    case Kind::kInt:
      out.add(std::to_string(value.as_int()));
      return;
    case Kind::kBigInt:
      out.add(value.digits());
      return;
    case Kind::kFloat:
      out.add(python_text::number(value.as_double()));
      return;
    case Kind::kString:
      out.add(python_text::quoted(value.as_string()));
      return;
    case Kind::kList: {
      const ListData& list = value.as_list();
      if (list.form == ListData::Form::kView) break;
      const bool is_tuple = list.form == ListData::Form::kTuple;
      out.add(is_tuple ? "(" : "[");
      for (std::size_t i = 0; i < list.items.size(); ++i) {
        if (i > 0) out.add(", ");
        repr(list.items[i], out);
      }
      if (is_tuple && list.items.size() == 1) out.add(",");
      out.add(is_tuple ? ")" : "]");
      return;
    }
    case Kind::kDict: {
      out.add("{");
      bool first = true;
      for (const auto& [key, item] : value.as_dict().items) {
        if (!first) out.add(", ");
        first = false;
        repr(key, out);
        out.add(": ");
        repr(item, out);
      }
      out.add("}");
      return;
    }
    default:
      break;
  }
  throw TypeError{fmt::format("a {} cannot be written as text", value.type_name())};
}

void json_string(std::string_view text, bool ensure_ascii, TextSink& out) {
  std::string piece = "\"";
  for (std::size_t at = 0; at < text.size();) {
    const utf8::Decoded next = utf8::decode(text, at);
    const char32_t c = next.code_point;
    switch (c) {
      case '"':
        piece += "\\\"";
        break;
      case '\\':
        piece += "\\\\";
        break;
      case '\n':
        piece += "\\n";
        break;
      case '\r':
        piece += "\\r";
        break;
      case '\t':
        piece += "\\t";
        break;
      case '\b':
        piece += "\\b";
        break;
      case '\f':
        piece += "\\f";
        break;
      default:
        if (c < 0x20 || (ensure_ascii && c >= 0x7F && c < 0x10000 && c != 0x7F)) {
          piece += fmt::format("\\u{:04x}", static_cast<unsigned>(c));
        } else if (ensure_ascii && c >= 0x10000) {
          piece += fmt::format("\\u{:04x}\\u{:04x}", static_cast<unsigned>(0xD7C0 + (c >> 10)),
                               static_cast<unsigned>(0xDC00 + (c & 0x3FF)));
        } else {
          piece += text.substr(at, next.bytes);
        }
    }
    at += next.bytes;
  }
  out.add(piece += '"');
}

std::string json_float(double value) {
  if (std::isnan(value)) return "NaN";
  if (std::isinf(value)) return value > 0 ? "Infinity" : "-Infinity";
  return python_text::number(value);
}

class JsonWriter {
 public:
  JsonWriter(const JsonStyle& style, TextSink& out)
      : style_(style), out_(out), has_lines_(style.indent >= 0 || !style.indent_text.empty()) {}

  void write(const Value& value, int level) {
    using Kind = Value::Kind;
    switch (value.kind()) {
      case Kind::kNone:
        out_.add("null");
        return;
      case Kind::kBool:
        out_.add(value.as_bool() ? "true" : "false");
        return;
      case Kind::kInt:
        out_.add(std::to_string(value.as_int()));
        return;
      case Kind::kBigInt:
        out_.add(value.digits());
        return;
      case Kind::kFloat:
        out_.add(json_float(value.as_double()));
        return;
      case Kind::kString:
        json_string(value.as_string(), style_.ensure_ascii, out_);
        return;
      case Kind::kList:
        if (value.as_list().form == ListData::Form::kView) break;
        write_list(value.as_list(), level);
        return;
      case Kind::kDict:
        write_dict(value.as_dict(), level);
        return;
      default:
        break;
    }
    throw TypeError{fmt::format("Object of type {} is not JSON serializable", value.type_name())};
  }

 private:
  void line(int level) {
    if (!has_lines_) return;
    out_.add("\n");
    for (int i = 0; i < level; ++i) {
      out_.add(style_.indent >= 0 ? std::string(static_cast<std::size_t>(style_.indent), ' ')
                                  : style_.indent_text);
    }
  }

  void write_list(const ListData& list, int level) {
    if (list.items.empty()) {
      out_.add("[]");
      return;
    }
    out_.add("[");
    for (std::size_t i = 0; i < list.items.size(); ++i) {
      if (i > 0) out_.add(style_.item_separator);
      line(level + 1);
      write(list.items[i], level + 1);
    }
    line(level);
    out_.add("]");
  }

  void write_dict(const DictData& dict, int level) {
    if (dict.items.empty()) {
      out_.add("{}");
      return;
    }
    std::vector<const std::pair<Value, Value>*> items;
    for (const auto& item : dict.items) items.push_back(&item);
    if (style_.sort_keys) {
      std::stable_sort(items.begin(), items.end(),
                       [](const auto* a, const auto* b) { return less(a->first, b->first); });
    }
    out_.add("{");
    bool first = true;
    for (const auto* item : items) {
      if (!first) out_.add(style_.item_separator);
      first = false;
      line(level + 1);
      json_string(key_text(item->first), style_.ensure_ascii, out_);
      out_.add(style_.key_separator);
      write(item->second, level + 1);
    }
    line(level);
    out_.add("}");
  }

  static std::string key_text(const Value& key) {
    using Kind = Value::Kind;
    switch (key.kind()) {
      case Kind::kString:
        return key.as_string();
      case Kind::kNone:
        return "null";
      case Kind::kBool:
        return key.as_bool() ? "true" : "false";
      case Kind::kInt:
        return std::to_string(key.as_int());
      case Kind::kBigInt:
        return key.digits();
      case Kind::kFloat:
        return json_float(key.as_double());
      default:
        throw TypeError{
            fmt::format("keys must be str, int, float, bool or None, not {}", key.type_name())};
    }
  }

  const JsonStyle& style_;
  TextSink& out_;
  bool has_lines_;
};

/// One conversion of a printf-like format.
struct Conversion {
  bool left = false, zero = false, sign = false, space = false;
  std::int64_t width = 0;
  int precision = -1;
  char type = 's';
};

std::string pad(std::string text, const Conversion& how) {
  const auto length = static_cast<std::int64_t>(utf8::length(text));
  if (length >= how.width) return text;
  const auto missing = static_cast<std::size_t>(how.width - length);
  if (how.left) return text + std::string(missing, ' ');
  const bool has_sign = !text.empty() && (text[0] == '-' || text[0] == '+');
  if (how.zero && how.type != 's' && how.type != 'r')
    return text.insert(has_sign ? 1 : 0, missing, '0');
  return std::string(missing, ' ') + text;
}

std::string convert(const Value& value, const Conversion& how, bool escapes,
                    std::size_t max_bytes) {
  std::string text;
  switch (how.type) {
    case 's':
    case 'r':
      text = how.type == 's' ? to_text(value, max_bytes) : to_repr(value, max_bytes);
      if (escapes) text = escaped(how.type == 's' ? value : Value::string(text), max_bytes);
      if (how.precision >= 0) {
        const std::u32string code_points = python_text::to_code_points(text);
        if (code_points.size() > static_cast<std::size_t>(how.precision)) {
          text = python_text::from_code_points(
              std::u32string_view(code_points).substr(0, how.precision));
        }
      }
      return pad(std::move(text), how);
    case 'd':
    case 'i':
    case 'x':
    case 'X':
    case 'o': {
      if (!value.is_number())
        throw TypeError{fmt::format("%{} format: a real number is required, not {}", how.type,
                                    value.type_name())};
      if (value.is(Value::Kind::kBigInt) && (how.type == 'd' || how.type == 'i')) {
        const bool is_negative = value.digits().starts_with('-');
        return pad((is_negative ? ""
                    : how.sign  ? "+"
                    : how.space ? " "
                                : "") +
                       value.digits(),
                   how);
      }
      const std::int64_t number =
          value.is_integral() ? value.as_int() : static_cast<std::int64_t>(value.as_double());
      const std::uint64_t magnitude =
          number < 0 ? 0 - static_cast<std::uint64_t>(number) : static_cast<std::uint64_t>(number);
      text = how.type == 'x'   ? fmt::format("{:x}", magnitude)
             : how.type == 'X' ? fmt::format("{:X}", magnitude)
             : how.type == 'o' ? fmt::format("{:o}", magnitude)
                               : fmt::format("{}", magnitude);
      text.insert(0, number < 0 ? "-" : how.sign ? "+" : how.space ? " " : "");
      return pad(std::move(text), how);
    }
    case 'f':
    case 'F':
    case 'e':
    case 'g': {
      if (!value.is_number())
        throw TypeError{fmt::format("must be real number, not {}", value.type_name())};
      const double number = value.as_double();
      const int precision = how.precision < 0 ? 6 : how.precision;
      text = how.type == 'e'   ? fmt::format("{:.{}e}", number, precision)
             : how.type == 'g' ? fmt::format("{:.{}g}", number, precision)
                               : fmt::format("{:.{}f}", number, precision);
      if (number >= 0) text.insert(0, how.sign ? "+" : how.space ? " " : "");
      return pad(std::move(text), how);
    }
    default:
      throw TypeError{fmt::format("the format character '{}' is not supported", how.type)};
  }
}

}  // namespace

std::string escaped(const Value& value, std::size_t max_bytes) {
  const std::string text = to_text(value, max_bytes);
  if (value.is_markup()) return text;
  TextSink out(max_bytes);
  for (const char& c : text) {
    switch (c) {
      case '&':
        out.add("&amp;");
        break;
      case '<':
        out.add("&lt;");
        break;
      case '>':
        out.add("&gt;");
        break;
      case '\'':
        out.add("&#39;");
        break;
      case '"':
        out.add("&#34;");
        break;
      default:
        out.add({&c, 1});
    }
  }
  return out.take();
}

std::string to_repr(const Value& value, std::size_t max_bytes) {
  TextSink out(max_bytes);
  repr(value, out);
  return out.take();
}

std::string to_text(const Value& value, std::size_t max_bytes) {
  if (value.is_string()) return value.as_string();
  if (value.is_undefined()) return {};
  return to_repr(value, max_bytes);
}

std::string to_json(const Value& value, const JsonStyle& style, std::size_t max_bytes) {
  TextSink out(max_bytes);
  JsonWriter(style, out).write(value, 0);
  return out.take();
}

Value format_percent(const Value& format_value, const Value& arguments, std::size_t max_bytes) {
  const std::string& format = format_value.as_string();
  const bool escapes = format_value.is_markup();
  constexpr std::int64_t kWidest = 1'000'000;
  const bool is_tuple =
      arguments.is(Value::Kind::kList) && arguments.as_list().form == ListData::Form::kTuple;
  std::size_t used = 0;
  const auto next = [&]() -> const Value& {
    if (is_tuple) {
      if (used >= arguments.as_list().items.size())
        throw TypeError{"not enough arguments for format string"};
      return arguments.as_list().items[used++];
    }
    if (used++ > 0) throw TypeError{"not enough arguments for format string"};
    return arguments;
  };
  TextSink out(max_bytes);
  bool named = false;
  for (std::size_t i = 0; i < format.size(); ++i) {
    if (format[i] != '%') {
      const std::size_t end = std::min(format.find('%', i), format.size());
      out.add(std::string_view(format).substr(i, end - i));
      i = end - 1;
      continue;
    }
    if (++i < format.size() && format[i] == '%') {
      out.add("%");
      continue;
    }
    const Value* chosen = nullptr;
    if (i < format.size() && format[i] == '(') {
      const std::size_t end = format.find(')', i);
      if (end == std::string::npos) throw TypeError{"incomplete format key"};
      if (!arguments.is_dict()) throw TypeError{"format requires a mapping"};
      chosen = arguments.as_dict().find(std::string_view(format).substr(i + 1, end - i - 1));
      if (chosen == nullptr)
        throw TypeError{fmt::format("KeyError: '{}'", format.substr(i + 1, end - i - 1))};
      named = true;
      i = end + 1;
    }
    Conversion how;
    for (; i < format.size(); ++i) {
      if (format[i] == '-')
        how.left = true;
      else if (format[i] == '0')
        how.zero = true;
      else if (format[i] == '+')
        how.sign = true;
      else if (format[i] == ' ')
        how.space = true;
      else
        break;
    }
    const auto read_number = [&] {
      std::int64_t number = 0;
      for (; i < format.size() && format[i] >= '0' && format[i] <= '9'; ++i) {
        number = std::min(number * 10 + (format[i] - '0'), kWidest + 1);
      }
      if (number > kWidest) throw TypeError{"the width of a format is too large"};
      return number;
    };
    how.width = read_number();
    if (i < format.size() && format[i] == '.') {
      ++i;
      how.precision = static_cast<int>(std::min<std::int64_t>(read_number(), 1000));
    }
    if (i >= format.size()) throw TypeError{"incomplete format"};
    how.type = format[i];
    out.add(convert(chosen != nullptr ? *chosen : next(), how, escapes, max_bytes));
  }
  // A value that can be indexed, except a text, could have been meant by name.
  const bool may_be_unused = arguments.is_dict() || arguments.is(Value::Kind::kList);
  if (!named &&
      (is_tuple ? used < arguments.as_list().items.size() : used == 0 && !may_be_unused)) {
    throw TypeError{"not all arguments converted during string formatting"};
  }
  return Value::string(out.take(), escapes);
}

Value format_braces(const Value& format_value, const CallArguments& arguments,
                    std::size_t max_bytes) {
  const std::string& format = format_value.as_string();
  const bool escapes = format_value.is_markup();
  TextSink out(max_bytes);
  std::size_t automatic = 0;
  for (std::size_t i = 0; i < format.size(); ++i) {
    const char c = format[i];
    if (c == '{' || c == '}') {
      if (i + 1 < format.size() && format[i + 1] == c) {
        out.add(std::string_view(&format[i], 1));
        ++i;
        continue;
      }
      if (c == '}') throw TypeError{"Single '}' encountered in format string"};
      const std::size_t end = format.find('}', i);
      if (end == std::string::npos) throw TypeError{"Single '{' encountered in format string"};
      const std::string field = format.substr(i + 1, end - i - 1);
      if (field.find_first_of(".[:!{") != std::string::npos) {
        throw TypeError{
            fmt::format("the replacement field '{{{}}}' of str.format is not supported", field)};
      }
      const Value* value = nullptr;
      if (field.find_first_not_of("0123456789") == std::string::npos) {
        const std::size_t index = field.empty()      ? automatic++
                                  : field.size() > 6 ? SIZE_MAX
                                                     : std::stoul(field);
        if (index < arguments.positional.size()) value = &arguments.positional[index];
      } else {
        for (const auto& [name, candidate] : arguments.named) {
          if (name == field) value = &candidate;
        }
      }
      if (value == nullptr)
        throw TypeError{fmt::format("no argument for the replacement field '{{{}}}'", field)};
      out.add(escapes ? escaped(*value, max_bytes) : to_text(*value, max_bytes));
      i = end;
    } else {
      const std::size_t end = std::min(format.find_first_of("{}", i), format.size());
      out.add(std::string_view(format).substr(i, end - i));
      i = end - 1;
    }
  }
  return Value::string(out.take(), escapes);
}

}  // namespace heddle::data::jinja
