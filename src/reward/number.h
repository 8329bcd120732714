#pragma once

#include <cstdint>
#include <optional>
#include <string>
#include <string_view>
#include <vector>

/// Numbers as people and models write them.
namespace heddle::reward {

/// numerator / denominator in lowest terms, denominator > 0. Operations answer nothing where 64
/// bits are too few or a divisor is zero.
struct Rational {
  std::int64_t numerator = 0, denominator = 1;
  bool operator==(const Rational&) const = default;
  double value() const { return static_cast<double>(numerator) / static_cast<double>(denominator); }
};
std::optional<Rational> make_rational(__int128 numerator, __int128 denominator);
std::optional<Rational> add(const Rational& a, const Rational& b);
std::optional<Rational> multiply(const Rational& a, const Rational& b);
std::optional<Rational> divide(const Rational& a, const Rational& b);

struct Number {
  double value = 0;
  std::optional<Rational> exact;  ///< Unless it is too long.
  std::string decimal;            ///< Sign, digits, "e", exponent in one form; empty: a fraction.
  bool is_percent = false;        ///< `value` is then a hundredth of what is written.
};

/// The number that begins at text[at] (a sign, a digit or a point, "\frac"), and the place after
/// it: "-3", "1,234.5", ".5", "6.02e23", "6.02 \times 10^{23}", "3/4", "\frac{3}{4}", "1 1/2",
/// "1\frac{1}{2}", each with "%" or not. Nothing for anything else.
struct Parsed {
  Number number;
  std::size_t end = 0;
};
std::optional<Parsed> parse_number_at(std::string_view text, std::size_t at);

/// The text as one number and nothing else but spaces, currency signs and a final point.
std::optional<Number> parse_number(std::string_view text);

/// The numbers of a text in their order. A hyphen after a digit or a letter is no sign, and digits
/// in a word ("H2O") are no number.
std::vector<Number> numbers_in(std::string_view text);

/// Tolerances: |a - b| <= absolute + relative x max(|a|, |b|). With both 0, numbers that are known
/// exactly are equal exactly, and others to 12 digits. Where one of them alone is a percentage,
/// "50%" equals both 0.5 and 50.
struct Tolerance {
  double relative = 0, absolute = 0;
};
bool equal(const Number& a, const Number& b, const Tolerance& tolerance = {});
bool close(double a, double b, const Tolerance& tolerance);

}  // namespace heddle::reward
