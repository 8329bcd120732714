#include "reward/number.h"

#include <algorithm>
#include <array>
#include <charconv>
#include <cmath>
#include <limits>
#include <numeric>

#include "base/text.h"
#include "reward/letters.h"

namespace heddle::reward {
namespace {

/// 10^18 is the largest power of ten that 64 bits hold.
constexpr std::int64_t kMostDigits = 18;
/// Digits beyond this are no number that anybody asked for; the bound keeps every scan linear.
constexpr std::size_t kLongestNumber = 400;

__int128 gcd(__int128 a, __int128 b) {
  while (b != 0) {
    const __int128 rest = a % b;
    a = b;
    b = rest;
  }
  return a < 0 ? -a : a;
}

/// A cursor over the text; every read either succeeds and moves, or fails and does not.
class Scanner {
 public:
  Scanner(std::string_view text, std::size_t at) : text_(text), at_(at) {}

  std::size_t at() const { return at_; }
  void move_to(std::size_t at) { at_ = at; }
  char peek(std::size_t ahead = 0) const {
    return at_ + ahead < text_.size() ? text_[at_ + ahead] : '\0';
  }
  bool take(std::string_view word) {
    if (!text_.substr(std::min(at_, text_.size())).starts_with(word)) return false;
    at_ += word.size();
    return true;
  }
  bool follows(char c) const { return at_ > 0 && at_ <= text_.size() && text_[at_ - 1] == c; }
  void skip_spaces() {
    // A number is close to its parts; more spaces than this end it.
    for (int count = 0; count < 4 && peek() == ' '; ++count) ++at_;
  }

  /// "-", "+", and the minus of Unicode. True for negative.
  bool sign() {
    if (take("-") || take("\u2212")) return true;
    take("+");
    return false;
  }

  /// "1,234" or "1234", without separators in `digits`; none: false.
  bool digits(std::string& digits) {
    const std::size_t begin = at_;
    while (is_digit(peek()) && at_ - begin < kLongestNumber) digits += text_[at_++];
    if (at_ == begin) return false;
    if (at_ - begin > 3 || digits.size() != at_ - begin) return true;
    while (at_ - begin < kLongestNumber) {
      const std::size_t comma = text_.substr(at_).starts_with("{,}") ? 3 : peek() == ',' ? 1 : 0;
      if (comma == 0 || !is_digit(peek(comma)) || !is_digit(peek(comma + 1)) ||
          !is_digit(peek(comma + 2)) || is_digit(peek(comma + 3))) {
        break;
      }
      digits.append(text_, at_ + comma, 3);
      at_ += comma + 3;
    }
    return true;
  }

  /// A whole number up to 18 digits.
  std::optional<std::int64_t> integer() {
    const std::size_t begin = at_;
    std::string text;
    std::int64_t value = 0;
    if (digits(text) && text.size() <= kMostDigits) {
      std::from_chars(text.data(), text.data() + text.size(), value);
      return value;
    }
    at_ = begin;
    return {};
  }

  /// "e-5" or "\times 10^{-5}".
  std::int64_t exponent() {
    const std::size_t begin = at_;
    bool is_braced = false;
    if ((peek() == 'e' || peek() == 'E')) {
      ++at_;
    } else {
      skip_spaces();
      if (!take("\\times") && !take("\\cdot") && !take("\u00d7")) return at_ = begin, 0;
      skip_spaces();
      if (!take("10^")) return at_ = begin, 0;
      is_braced = take("{");
    }
    const bool is_negative = sign();
    std::int64_t value = 0;
    const std::size_t first = at_;
    while (is_digit(peek()) && at_ - first < 6) value = value * 10 + (text_[at_++] - '0');
    if (at_ == first || is_digit(peek()) || (is_braced && !take("}"))) return at_ = begin, 0;
    return is_negative ? -value : value;
  }

  /// "{3}" or one digit, as an argument of \frac.
  std::optional<Rational> argument() {
    const std::size_t begin = at_;
    if (is_digit(peek())) return Rational{text_[at_++] - '0', 1};
    if (take("{")) {
      skip_spaces();
      const bool is_negative = sign();
      const auto value = integer();
      skip_spaces();
      if (value && take("}")) return Rational{is_negative ? -*value : *value, 1};
    }
    at_ = begin;
    return {};
  }

  std::optional<Rational> latex_fraction() {
    const std::size_t begin = at_;
    if (take("\\frac") || take("\\dfrac") || take("\\tfrac") || take("\\cfrac")) {
      const auto above = argument();
      const auto below = above ? argument() : std::nullopt;
      if (const auto value = below ? divide(*above, *below) : std::nullopt) return value;
    }
    at_ = begin;
    return {};
  }

 private:
  std::string_view text_;
  std::size_t at_;
};

Number fraction(const Rational& value) { return {value.value(), value, {}, false}; }

Number decimal(std::string whole, std::string part, std::int64_t exponent) {
  std::string digits = whole + part;
  exponent -= static_cast<std::int64_t>(part.size());
  digits.erase(0, std::min(digits.find_first_not_of('0'), digits.size()));
  while (!digits.empty() && digits.back() == '0') {
    digits.pop_back();
    ++exponent;
  }
  if (digits.empty()) return {0, Rational{0, 1}, "0", false};
  Number number;
  number.decimal = digits + "e" + std::to_string(exponent);
  const char* end = number.decimal.data() + number.decimal.size();
  if (std::from_chars(number.decimal.data(), end, number.value).ec != std::errc()) {
    number.value = exponent > 0 ? std::numeric_limits<double>::infinity() : 0;
  }
  if (digits.size() > kMostDigits || std::abs(exponent) > kMostDigits) return number;
  std::int64_t mantissa = 0, power = 1;
  std::from_chars(digits.data(), digits.data() + digits.size(), mantissa);
  for (std::int64_t k = 0; k < std::abs(exponent); ++k) power *= 10;
  number.exact = exponent < 0 ? make_rational(mantissa, power)
                              : make_rational(static_cast<__int128>(mantissa) * power, 1);
  return number;
}

void negate(Number& number) {
  number.value = -number.value;
  if (number.exact) number.exact->numerator = -number.exact->numerator;
  if (!number.decimal.empty() && number.decimal != "0") number.decimal.insert(0, "-");
}

/// "a/b", "1 1/2" and "1\frac{1}{2}" after the whole number a, which stands in `whole`.
std::optional<Rational> rest_of_fraction(Scanner& scan, const Rational& whole) {
  const std::size_t begin = scan.at();
  if (scan.take("/")) {
    // "1/2/2024" is a date.
    const auto below = scan.integer();
    if (below && !(scan.peek() == '/' && is_digit(scan.peek(1)))) {
      if (const auto value = divide(whole, {*below, 1})) return value;
    }
    scan.move_to(begin);
    return {};
  }
  scan.skip_spaces();
  std::optional<Rational> part = scan.latex_fraction();
  if (!part && scan.at() > begin) {
    const auto above = scan.integer();
    if (above && scan.take("/")) {
      const auto below = scan.integer();
      if (below && *above < *below) part = divide({*above, 1}, {*below, 1});
    }
  }
  if (part) {
    if (const auto sum = add(whole, *part)) return sum;
  }
  scan.move_to(begin);
  return {};
}

/// Without sign and percent.
std::optional<Number> unsigned_number(Scanner& scan) {
  if (const auto value = scan.latex_fraction()) return fraction(*value);
  std::string whole, part;
  const bool is_in_date = scan.follows('/');
  const bool has_whole = scan.digits(whole);
  if (scan.peek() == '.' && is_digit(scan.peek(1))) {
    scan.move_to(scan.at() + 1);
    std::string more;
    while (is_digit(scan.peek()) && more.size() < kLongestNumber) {
      more += scan.peek();
      scan.move_to(scan.at() + 1);
    }
    part = more;
  } else if (!has_whole) {
    return {};
  }
  if (part.empty() && whole.size() <= kMostDigits && !is_in_date) {
    std::int64_t value = 0;
    std::from_chars(whole.data(), whole.data() + whole.size(), value);
    if (const auto exact = rest_of_fraction(scan, {value, 1})) return fraction(*exact);
  }
  return decimal(std::move(whole), std::move(part), scan.exponent());
}

}  // namespace

std::optional<Rational> make_rational(__int128 numerator, __int128 denominator) {
  if (denominator == 0) return {};
  const __int128 divisor = gcd(numerator, denominator) * (denominator < 0 ? -1 : 1);
  numerator /= divisor;
  denominator /= divisor;
  constexpr __int128 kMost = std::numeric_limits<std::int64_t>::max();
  if (numerator > kMost || numerator < -kMost || denominator > kMost) return {};
  return Rational{static_cast<std::int64_t>(numerator), static_cast<std::int64_t>(denominator)};
}

std::optional<Rational> add(const Rational& a, const Rational& b) {
  // Each product stays below 2^126, so their sum fits.
  return make_rational(static_cast<__int128>(a.numerator) * b.denominator +
                           static_cast<__int128>(b.numerator) * a.denominator,
                       static_cast<__int128>(a.denominator) * b.denominator);
}

std::optional<Rational> multiply(const Rational& a, const Rational& b) {
  return make_rational(static_cast<__int128>(a.numerator) * b.numerator,
                       static_cast<__int128>(a.denominator) * b.denominator);
}

std::optional<Rational> divide(const Rational& a, const Rational& b) {
  return make_rational(static_cast<__int128>(a.numerator) * b.denominator,
                       static_cast<__int128>(a.denominator) * b.numerator);
}

std::optional<Parsed> parse_number_at(std::string_view text, std::size_t at) {
  Scanner scan(text, at);
  const bool is_negative = scan.sign();
  scan.take("$");
  std::optional<Number> number = unsigned_number(scan);
  if (!number) return {};
  if (is_negative) negate(*number);
  const std::size_t end = scan.at();
  scan.skip_spaces();
  if (scan.take("%") || scan.take("\\%")) {
    number->is_percent = true;
    number->value /= 100;
    number->decimal.clear();
    if (number->exact) number->exact = divide(*number->exact, {100, 1});
  } else {
    scan.move_to(end);
  }
  return Parsed{*std::move(number), scan.at()};
}

namespace {

std::string_view without_currency(std::string_view text) {
  text = text::trim(text);
  for (const std::string_view mark : {"\\$", "$", "\u20ac", "\u00a3", "\u00a5"}) {
    if (text.starts_with(mark)) return text::trim(text.substr(mark.size()));
  }
  return text;
}

}  // namespace

std::optional<Number> parse_number(std::string_view text) {
  text = without_currency(text);
  const auto parsed = parse_number_at(text, 0);
  if (!parsed) return {};
  std::string_view rest = text::trim(text.substr(parsed->end));
  if (rest.starts_with(".")) rest.remove_prefix(1);
  if (rest == "$" || rest == "\\$" || rest == "\u20ac") rest = {};
  if (!rest.empty()) return {};
  return parsed->number;
}

std::vector<Number> numbers_in(std::string_view text) {
  std::vector<Number> numbers;
  char before = ' ';
  for (std::size_t at = 0; at < text.size();) {
    const char c = text[at];
    const bool is_sign = c == '-' || text.substr(at).starts_with("\u2212");
    const bool may_begin = is_digit(c) || c == '.' || c == '\\' || is_sign;
    // Inside a word or after a number, "-" is a hyphen or a difference.
    const bool is_free =
        !is_letter(before) && before != '_' && !(is_sign && (is_digit(before) || before == ')'));
    if (may_begin && (is_free || c == '\\')) {
      if (const auto parsed = parse_number_at(text, at); parsed && parsed->end > at) {
        before = text[parsed->end - 1];
        at = parsed->end;
        if (is_digit(text[at - 1]) && at < text.size() && is_letter(text[at])) {
          // "3D": a word that begins with digits still says a number ("5km").
          before = ' ';
        }
        numbers.push_back(parsed->number);
        continue;
      }
    }
    // The digits of a word are passed over whole, so that "x12" does not yield 2.
    before = is_digit(c) && !is_free ? 'a' : c;
    ++at;
  }
  return numbers;
}

bool close(double a, double b, const Tolerance& tolerance) {
  if (!std::isfinite(a) || !std::isfinite(b)) return false;
  return std::abs(a - b) <=
         tolerance.absolute + tolerance.relative * std::max(std::abs(a), std::abs(b));
}

bool equal(const Number& a, const Number& b, const Tolerance& tolerance) {
  if (a.is_percent != b.is_percent) {
    Number as_written = a.is_percent ? a : b;
    const Number& other = a.is_percent ? b : a;
    as_written.is_percent = other.is_percent;
    if (equal(as_written, other, tolerance)) return true;
    as_written.value *= 100;
    if (as_written.exact) as_written.exact = multiply(*as_written.exact, {100, 1});
    return equal(as_written, other, tolerance);
  }
  const bool is_exact = tolerance.relative == 0 && tolerance.absolute == 0;
  if (!a.decimal.empty() && a.decimal == b.decimal) return true;
  if (a.exact && b.exact && *a.exact == *b.exact) return true;
  if (!is_exact) return close(a.value, b.value, tolerance);
  if (a.exact && b.exact) return false;
  // Both as decimals of any length: they differ, however little.
  if (!a.decimal.empty() && !b.decimal.empty()) return false;
  return close(a.value, b.value, {1e-12, 0});
}

}  // namespace heddle::reward
