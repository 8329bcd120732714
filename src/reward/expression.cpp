#include "reward/expression.h"

#include <algorithm>
#include <cmath>
#include <limits>
#include <set>
#include <utility>

#include "base/rng.h"
#include "reward/expression_functions.h"

namespace heddle::reward {
namespace {

double factorial(double x) {
  const bool is_natural = x >= 0 && x <= 170 && x == std::floor(x);
  return is_natural ? std::round(std::tgamma(x + 1)) : std::numeric_limits<double>::quiet_NaN();
}

std::optional<Rational> power(Rational base, const Rational& exponent) {
  constexpr std::int64_t kMost = 64;
  if (exponent.denominator != 1 || std::abs(exponent.numerator) > kMost) return {};
  if (exponent.numerator < 0) {
    const auto inverse = divide({1, 1}, base);
    if (!inverse) return {};
    base = *inverse;
  }
  std::optional<Rational> result = Rational{1, 1};
  for (std::int64_t k = 0; result && k < std::abs(exponent.numerator); ++k)
    result = multiply(*result, base);
  return result;
}

std::optional<Rational> factorial(const Rational& x) {
  constexpr std::int64_t kMost = 20;  // 21! has more than 64 bits
  if (x.denominator != 1 || x.numerator < 0 || x.numerator > kMost) return {};
  std::int64_t result = 1;
  for (std::int64_t k = 2; k <= x.numerator; ++k) result *= k;
  return Rational{result, 1};
}

}  // namespace

double Expression::at(const std::vector<double>& values) const {
  std::vector<double> found(nodes_.size());
  const auto operand = [&](std::int32_t place) { return found[static_cast<std::size_t>(place)]; };
  for (std::size_t k = 0; k < nodes_.size(); ++k) {
    const Node& node = nodes_[k];
    if (node.kind != Kind::kCall) {
      found[k] = node.kind == Kind::kNumber ? node.number.value : values[node.variable];
      continue;
    }
    const double left = operand(node.left), right = node.right < 0 ? 0 : operand(node.right);
    switch (node.call) {
      case '+':
        found[k] = left + right;
        break;
      case '*':
        found[k] = left * right;
        break;
      case '/':
        found[k] = left / right;
        break;
      case '^':
        found[k] = std::pow(left, right);
        break;
      case '-':
        found[k] = -left;
        break;
      case '!':
        found[k] = factorial(left);
        break;
      default:
        found[k] = kFunctions[static_cast<std::size_t>(node.call - kFirstFunction)].function(left);
    }
  }
  return found.back();
}

std::optional<Rational> Expression::exact() const {
  std::vector<std::optional<Rational>> found(nodes_.size());
  for (std::size_t k = 0; k < nodes_.size(); ++k) {
    const Node& node = nodes_[k];
    if (node.kind == Kind::kVariable) return {};
    if (node.kind == Kind::kNumber) {
      found[k] = node.number.exact;
    } else {
      const auto& left = found[static_cast<std::size_t>(node.left)];
      const Rational right =
          node.right < 0 ? Rational{} : *found[static_cast<std::size_t>(node.right)];
      switch (node.call) {
        case '+':
          found[k] = add(*left, right);
          break;
        case '*':
          found[k] = multiply(*left, right);
          break;
        case '/':
          found[k] = divide(*left, right);
          break;
        case '^':
          found[k] = power(*left, right);
          break;
        case '-':
          found[k] = Rational{-left->numerator, left->denominator};
          break;
        case '!':
          found[k] = factorial(*left);
          break;
        default:
          return {};
      }
    }
    if (!found[k]) return {};
  }
  return found.back();
}

bool same_value(const Expression& a, const Expression& b, const Tolerance& tolerance) {
  const bool is_exact = tolerance.relative == 0 && tolerance.absolute == 0;
  if (is_exact) {
    const auto left = a.exact(), right = b.exact();
    if (left && right) return *left == *right;
  }
  std::set<std::string> names(a.variables().begin(), a.variables().end());
  names.insert(b.variables().begin(), b.variables().end());
  const CounterRng random(0, "points of expressions");
  constexpr int kPoints = 5, kEnough = 3;
  constexpr Tolerance kNineDigits{1e-9, 1e-12};
  int agreed = 0;
  for (int point = 0; point < kPoints; ++point) {
    std::map<std::string, double> values;
    // Between 0.3 and 2.8: logarithms and roots have values, and no point is special.
    std::uint64_t index = static_cast<std::uint64_t>(point) << 16;
    for (const std::string& name : names) values[name] = 0.3 + 2.5 * random.uniform(index++);
    const auto value_of = [&](const Expression& expression) {
      std::vector<double> own;
      for (const std::string& name : expression.variables()) own.push_back(values[name]);
      return expression.at(own);
    };
    const double left = value_of(a), right = value_of(b);
    if (std::isnan(left) && std::isnan(right)) continue;
    if (!close(left, right, is_exact ? kNineDigits : tolerance)) return false;
    if (names.empty()) return true;
    ++agreed;
  }
  return agreed >= kEnough;
}

}  // namespace heddle::reward
