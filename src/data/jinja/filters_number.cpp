#include <charconv>
#include <cmath>

#include "data/jinja/filter.h"
#include "data/jinja/python_text.h"

namespace heddle::data::jinja {
namespace {

using Kind = Value::Kind;

Value filter_abs(const FilterCall& call) {
  call.need_defined();
  if (!call.subject.is_number())
    throw TypeError{fmt::format("bad operand type for abs(): '{}'", call.subject.type_name())};
  if (call.subject.is(Kind::kBigInt)) {
    const std::string& digits = call.subject.digits();
    return Value::integer_of(digits.starts_with('-') ? digits.substr(1) : digits);
  }
  if (!call.subject.is_integral()) return Value::real(std::fabs(call.subject.as_double()));
  return call.subject.as_int() < 0 ? subtract(Value::integer(0), call.subject)
                                   : Value::integer(call.subject.as_int());
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

/// int(text, base) of Python; an integer beyond 64 bits in base 10 only. False if it is none.
bool parse_integer(std::string_view text, int base, Value& value) {
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
  std::int64_t number = 0;
  const auto result = std::from_chars(digits.data(), digits.data() + digits.size(), number, base);
  if (result.ptr != digits.data() + digits.size()) return false;
  if (result.ec == std::errc::result_out_of_range && base == 10) {
    const std::size_t first = digits.find_first_not_of('0', at);
    value = Value::integer_of((negative ? "-" : "") + digits.substr(first));
    return true;
  }
  value = Value::integer(number);
  return result.ec == std::errc();
}

Value filter_float(const FilterCall& call) {
  const auto arguments = call.read({"default"});
  double value = 0;
  if (call.subject.is_number()) return Value::real(call.subject.as_double());
  if (call.subject.is_string() && parse_float(call.subject.as_string(), value))
    return Value::real(value);
  if (call.subject.is_undefined()) call.need_defined();
  return arguments.has(0) ? arguments.at(0) : Value::real(0);
}

Value filter_int(const FilterCall& call) {
  const auto arguments = call.read({"default", "base"});
  const Value otherwise = arguments.has(0) ? arguments.at(0) : Value::integer(0);
  const auto truncate = [&](double value) {
    if (!std::isfinite(value)) return otherwise;
    if (std::fabs(value) >= 9.2e18) throw TypeError{"an integer needs more than 64 bits"};
    return Value::integer(static_cast<std::int64_t>(value));
  };
  if (call.subject.is(Kind::kBigInt)) return call.subject;
  if (call.subject.is_integral()) return Value::integer(call.subject.as_int());
  if (call.subject.is(Kind::kFloat)) return truncate(call.subject.as_double());
  call.need_defined();
  if (!call.subject.is_string()) return otherwise;
  const std::int64_t base = arguments.integer(1, 10);
  if (base < 2 || base > 36) throw TypeError{"int() base must be >= 2 and <= 36"};
  Value value;
  call.interpreter.work(Interpreter::cost(call.subject));
  if (parse_integer(call.subject.as_string(), static_cast<int>(base), value)) return value;
  double real = 0;
  if (parse_float(call.subject.as_string(), real)) return truncate(real);
  return otherwise;
}

Value filter_round(const FilterCall& call) {
  const auto arguments = call.read({"precision", "method"});
  call.need_defined();
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
      if (call.subject.is(Kind::kBigInt) && precision >= 0) return call.subject;
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

constexpr Filter kNumberFilters[] = {
    {"abs", filter_abs},
    {"float", filter_float},
    {"int", filter_int},
    {"round", filter_round},
};

}  // namespace

std::span<const Filter> number_filters() { return kNumberFilters; }

}  // namespace heddle::data::jinja
