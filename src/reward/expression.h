#pragma once

#include <cstdint>
#include <map>
#include <optional>
#include <string>
#include <string_view>
#include <vector>

#include "reward/number.h"

namespace heddle::reward {

/// An expression of school mathematics in (La)TeX or plain text: numbers, variables of one letter,
/// + - * / ^ !, \frac, \sqrt, \pi, e, |x|, \binom, and the usual functions. Products may leave the
/// sign out. There is no symbolic algebra: expressions are compared by their values.
class Expression {
 public:
  /// Nothing for anything else, and for what is longer than 2,000 bytes or nested deeper than 40.
  static std::optional<Expression> parse(std::string_view text);

  /// Single letters and Greek names, in the order of at()'s values.
  const std::vector<std::string>& variables() const { return variables_; }
  /// At these values, one for each variable; not a number where it has none.
  double at(const std::vector<double>& values) const;
  /// Without variables and roots: the value itself, unless 64 bits are too few.
  std::optional<Rational> exact() const;

  enum class Kind : std::uint8_t { kNumber, kVariable, kCall };
  struct Node {
    Kind kind = Kind::kNumber;
    char call = 0;  ///< kCall: '+', '*', '/', '^', '-' (negation), '!', or an index of a function.
    Number number = {};
    std::size_t variable = 0;
    std::int32_t left = -1, right = -1;
  };

 private:
  friend class ExpressionParser;
  std::vector<Node> nodes_;  ///< Operands stand before what uses them; the last is the root.
  std::vector<std::string> variables_;
};

/// Equal as exact fractions, or else to 9 digits at five points that are drawn at random from a
/// fixed seed. `tolerance` replaces the 9 digits.
bool same_value(const Expression& a, const Expression& b, const Tolerance& tolerance);

}  // namespace heddle::reward
