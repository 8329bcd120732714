#include <cmath>

#include "data/jinja/builtins.h"
#include "data/jinja/python_text.h"
#include "data/tokenizer/utf8.h"

namespace heddle::data::jinja {
namespace {

[[noreturn]] void unsupported_operands(const char* op, const Value& a, const Value& b) {
  throw TypeError{fmt::format("unsupported operand type(s) for {}: '{}' and '{}'", op,
                              a.type_name(), b.type_name())};
}

[[noreturn]] void overflow() { throw TypeError{"an integer needs more than 64 bits"}; }

bool are_integral(const Value& a, const Value& b) { return a.is_integral() && b.is_integral(); }

void need_numbers(const char* op, const Value& a, const Value& b) {
  if (!a.is_number() || !b.is_number()) unsupported_operands(op, a, b);
}

}  // namespace

ArgumentReader::ArgumentReader(std::string_view function, const CallArguments& arguments,
                               std::initializer_list<const char*> names)
    : function_(function), names_(names), values_(names.size(), nullptr) {
  if (arguments.positional.size() > names.size()) {
    throw TypeError{fmt::format("{}() takes at most {} arguments ({} given)", function,
                                names.size(), arguments.positional.size())};
  }
  for (std::size_t i = 0; i < arguments.positional.size(); ++i)
    values_[i] = &arguments.positional[i];
  for (const auto& [name, value] : arguments.named) {
    std::size_t index = 0;
    while (index < names_.size() && name != names_[index]) ++index;
    if (index == names_.size())
      throw TypeError{fmt::format("{}() got an unexpected keyword argument '{}'", function, name)};
    if (values_[index] != nullptr)
      throw TypeError{fmt::format("{}() got multiple values for argument '{}'", function, name)};
    values_[index] = &value;
  }
}

const Value& ArgumentReader::at(int index) const {
  if (!has(index))
    throw TypeError{fmt::format("{}() missing argument '{}'", function_, names_[index])};
  return *values_[index];
}

std::optional<std::string> ArgumentReader::string(int index) const {
  if (!has(index) || at(index).is_none()) return std::nullopt;
  if (!at(index).is_string()) {
    throw TypeError{fmt::format("{}() argument '{}' must be str, not {}", function_, names_[index],
                                at(index).type_name())};
  }
  return at(index).as_string();
}

std::int64_t ArgumentReader::integer(int index, std::int64_t otherwise) const {
  if (!has(index) || at(index).is_none()) return otherwise;
  if (!at(index).is_integral()) {
    throw TypeError{fmt::format("{}() argument '{}' must be int, not {}", function_, names_[index],
                                at(index).type_name())};
  }
  return at(index).as_int();
}

Values iterate(const Value& value) {
  using Kind = Value::Kind;
  switch (value.kind()) {
    case Kind::kUndefined:
      return {};
    case Kind::kList:
      return value.as_list().items;
    case Kind::kDict: {
      Values keys;
      keys.reserve(value.as_dict().items.size());
      for (const auto& [key, item] : value.as_dict().items) keys.push_back(key);
      return keys;
    }
    case Kind::kString: {
      const std::string& text = value.as_string();
      Values characters;
      for (std::size_t at = 0; at < text.size();) {
        const std::size_t bytes = utf8::decode(text, at).bytes;
        characters.push_back(Value::string(text.substr(at, bytes)));
        at += bytes;
      }
      return characters;
    }
    case Kind::kIterator: {
      IteratorData& data = value.as_iterator();
      Values rest(data.items.begin() + static_cast<std::ptrdiff_t>(data.next), data.items.end());
      data.next = data.items.size();
      return rest;
    }
    default:
      throw TypeError{fmt::format("'{}' object is not iterable", value.type_name())};
  }
}

std::int64_t length(const Value& value) {
  using Kind = Value::Kind;
  switch (value.kind()) {
    case Kind::kUndefined:
      return 0;
    case Kind::kString:
      return static_cast<std::int64_t>(utf8::length(value.as_string()));
    case Kind::kList:
      return static_cast<std::int64_t>(value.as_list().items.size());
    case Kind::kDict:
      return static_cast<std::int64_t>(value.as_dict().items.size());
    case Kind::kLoop:
      return static_cast<std::int64_t>(value.as_loop().items.size());
    default:
      throw TypeError{fmt::format("object of type '{}' has no len()", value.type_name())};
  }
}

Value add(const Value& a, const Value& b, std::size_t max_bytes) {
  if (are_integral(a, b)) {
    std::int64_t result;
    if (__builtin_add_overflow(a.as_int(), b.as_int(), &result)) overflow();
    return Value::integer(result);
  }
  if (a.is_string() && b.is_string()) {
    if (!a.is_markup() && !b.is_markup()) return Value::string(a.as_string() + b.as_string());
    return Value::string(escaped(a, max_bytes) + escaped(b, max_bytes), true);
  }
  if (a.is(Value::Kind::kList) && b.is(Value::Kind::kList) &&
      a.as_list().form == b.as_list().form && a.as_list().form != ListData::Form::kView) {
    Values items = a.as_list().items;
    items.insert(items.end(), b.as_list().items.begin(), b.as_list().items.end());
    return a.as_list().form == ListData::Form::kTuple ? Value::tuple(std::move(items))
                                                      : Value::list(std::move(items));
  }
  need_numbers("+", a, b);
  return Value::real(a.as_double() + b.as_double());
}

Value subtract(const Value& a, const Value& b) {
  need_numbers("-", a, b);
  if (!are_integral(a, b)) return Value::real(a.as_double() - b.as_double());
  std::int64_t result;
  if (__builtin_sub_overflow(a.as_int(), b.as_int(), &result)) overflow();
  return Value::integer(result);
}

Value multiply(const Value& a, const Value& b, std::size_t max_bytes) {
  if (are_integral(a, b)) {
    std::int64_t result;
    if (__builtin_mul_overflow(a.as_int(), b.as_int(), &result)) overflow();
    return Value::integer(result);
  }
  const bool a_counts = a.is_integral() && (b.is_string() || b.is(Value::Kind::kList));
  const bool b_counts = b.is_integral() && (a.is_string() || a.is(Value::Kind::kList));
  if (a_counts || b_counts) {
    const Value& what = a_counts ? b : a;
    const auto count =
        static_cast<std::uint64_t>(std::max<std::int64_t>(0, a_counts ? a.as_int() : b.as_int()));
    if (what.is_string()) {
      const std::string& text = what.as_string();
      if (!text.empty() && count > max_bytes / text.size())
        throw TypeError{fmt::format("a text of more than {} bytes", max_bytes)};
      std::string out;
      out.reserve(text.size() * count);
      for (std::uint64_t i = 0; i < count && !text.empty(); ++i) out += text;
      return Value::string(std::move(out), what.is_markup());
    }
    const ListData& list = what.as_list();
    if (list.form == ListData::Form::kView) unsupported_operands("*", a, b);
    if (!list.items.empty() && count > Value::kHeaviest / list.items.size()) {
      throw TypeError{fmt::format("a list of more than {} values", Value::kHeaviest)};
    }
    Values items;
    for (std::uint64_t i = 0; i < count && !list.items.empty(); ++i) {
      items.insert(items.end(), list.items.begin(), list.items.end());
    }
    return list.form == ListData::Form::kTuple ? Value::tuple(std::move(items))
                                               : Value::list(std::move(items));
  }
  need_numbers("*", a, b);
  return Value::real(a.as_double() * b.as_double());
}

Value divide(const Value& a, const Value& b) {
  need_numbers("/", a, b);
  if (b.as_double() == 0) throw TypeError{"division by zero"};
  return Value::real(a.as_double() / b.as_double());
}

Value floor_divide(const Value& a, const Value& b) {
  need_numbers("//", a, b);
  if (b.as_double() == 0) throw TypeError{"division by zero"};
  if (!are_integral(a, b)) return Value::real(std::floor(a.as_double() / b.as_double()));
  const std::int64_t x = a.as_int(), y = b.as_int();
  if (x == INT64_MIN && y == -1) overflow();
  const std::int64_t quotient = x / y;
  return Value::integer(quotient - (x % y != 0 && (x < 0) != (y < 0)));
}

Value modulo(const Value& a, const Value& b) {
  need_numbers("%", a, b);
  if (b.as_double() == 0) throw TypeError{"integer modulo by zero"};
  if (!are_integral(a, b)) {
    const double rest = std::fmod(a.as_double(), b.as_double());
    return Value::real(rest != 0 && (rest < 0) != (b.as_double() < 0) ? rest + b.as_double()
                                                                      : rest);
  }
  const std::int64_t x = a.as_int(), y = b.as_int();
  if (y == -1) return Value::integer(0);
  const std::int64_t rest = x % y;
  return Value::integer(rest != 0 && (rest < 0) != (y < 0) ? rest + y : rest);
}

Value power(const Value& a, const Value& b) {
  need_numbers("**", a, b);
  if (are_integral(a, b) && b.as_int() >= 0) {
    std::int64_t result = 1, base = a.as_int();
    for (std::int64_t exponent = b.as_int(); exponent > 0; exponent >>= 1) {
      if ((exponent & 1) && __builtin_mul_overflow(result, base, &result)) overflow();
      if (exponent > 1 && __builtin_mul_overflow(base, base, &base)) overflow();
    }
    return Value::integer(result);
  }
  if (a.as_double() == 0 && b.as_double() < 0)
    throw TypeError{"0.0 cannot be raised to a negative power"};
  return Value::real(std::pow(a.as_double(), b.as_double()));
}

bool contains(const Value& container, const Value& item) {
  using Kind = Value::Kind;
  switch (container.kind()) {
    case Kind::kUndefined:
      return false;
    case Kind::kString:
      if (!item.is_string()) {
        throw TypeError{
            fmt::format("'in <string>' requires string as left operand, not {}", item.type_name())};
      }
      return container.as_string().find(item.as_string()) != std::string::npos;
    case Kind::kDict:
      return container.as_dict().find(item) != nullptr;
    case Kind::kList:
      for (const Value& candidate : container.as_list().items) {
        if (equal(candidate, item)) return true;
      }
      return false;
    case Kind::kIterator: {
      IteratorData& data = container.as_iterator();
      while (data.next < data.items.size()) {
        if (equal(data.items[data.next++], item)) return true;
      }
      return false;
    }
    default:
      throw TypeError{fmt::format("argument of type '{}' is not iterable", container.type_name())};
  }
}

}  // namespace heddle::data::jinja
