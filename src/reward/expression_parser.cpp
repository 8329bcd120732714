#include <algorithm>
#include <array>
#include <cmath>
#include <numbers>
#include <string>
#include <utility>

#include "reward/expression.h"
#include "reward/expression_functions.h"
#include "reward/letters.h"

namespace heddle::reward {
namespace {

constexpr std::size_t kMostBytes = 2000, kMostNodes = 1000;
constexpr int kMostDepth = 40;

constexpr std::array<std::string_view, 14> kGreek{"alpha",  "beta",    "gamma", "delta", "theta",
                                                  "lambda", "mu",      "phi",   "sigma", "omega",
                                                  "infty",  "epsilon", "rho",   "tau"};

std::size_t index_of(std::string_view name) {
  for (std::size_t k = 0; k < kFunctions.size(); ++k) {
    if (kFunctions[k].name == name) return k;
  }
  return kFunctions.size();
}

}  // namespace

/// Recursive descent: sum, product, power, atom. A read that fails sets `failed_` once and for all.
class ExpressionParser {
 public:
  explicit ExpressionParser(std::string_view text) : text_(text) {}

  std::optional<Expression> parse() {
    const std::int32_t root = sum();
    skip();
    if (failed_ || root < 0 || at_ != text_.size()) return {};
    result_.variables_ = std::move(names_);
    return std::move(result_);
  }

 private:
  using Node = Expression::Node;
  using Kind = Expression::Kind;

  std::int32_t fail() {
    failed_ = true;
    return -1;
  }

  std::int32_t push(Node node) {
    if (result_.nodes_.size() >= kMostNodes) return fail();
    result_.nodes_.push_back(std::move(node));
    return static_cast<std::int32_t>(result_.nodes_.size() - 1);
  }

  std::int32_t call(char name, std::int32_t left, std::int32_t right = -1) {
    if (failed_ || left < 0) return fail();
    Node node;
    node.kind = Kind::kCall;
    node.call = name;
    node.left = left;
    node.right = right;
    return push(std::move(node));
  }

  std::int32_t number(double value) {
    Node node;
    node.number.value = value;
    if (value == std::floor(value))
      node.number.exact = Rational{static_cast<std::int64_t>(value), 1};
    return push(std::move(node));
  }

  std::int32_t variable(std::string name) {
    Node node;
    node.kind = Kind::kVariable;
    const auto known = std::find(names_.begin(), names_.end(), name);
    node.variable = static_cast<std::size_t>(known - names_.begin());
    if (known == names_.end()) names_.push_back(std::move(name));
    return push(std::move(node));
  }

  char peek() const { return at_ < text_.size() ? text_[at_] : '\0'; }
  void skip() {
    while (peek() == ' ') ++at_;
  }
  bool take(std::string_view word) {
    skip();
    if (!text_.substr(at_).starts_with(word)) return false;
    // A command ends where its letters do: \pi is no begin of \pitchfork.
    const bool is_command = word.size() > 1 && word[0] == '\\' && is_letter(word.back());
    if (is_command && at_ + word.size() < text_.size() && is_letter(text_[at_ + word.size()]))
      return false;
    at_ += word.size();
    return true;
  }

  /// Counts how deep the descent is; every way back into sum() passes here.
  struct Depth {
    explicit Depth(int& depth) : depth_(depth) { ++depth_; }
    ~Depth() { --depth_; }
    int& depth_;
  };

  std::int32_t sum() {
    const Depth depth(depth_);
    if (depth_ > kMostDepth) return fail();
    skip();
    std::int32_t left = signed_product();
    while (!failed_) {
      if (take("+")) {
        left = call('+', left, product());
      } else if (take("-")) {
        left = call('+', left, call('-', product()));
      } else {
        break;
      }
    }
    return left;
  }

  std::int32_t signed_product() {
    bool is_negative = false;
    while (true) {
      if (take("-")) {
        is_negative = !is_negative;
      } else if (!take("+")) {
        break;
      }
    }
    const std::int32_t value = product();
    return is_negative ? call('-', value) : value;
  }

  std::int32_t product() {
    std::int32_t left = power_of();
    while (!failed_) {
      if (take("*") || take("\\times") || take("\\cdot")) {
        left = call('*', left, signed_power());
      } else if (take("/") || take("\\div")) {
        left = call('/', left, signed_power());
      } else if (begins_atom()) {
        left = call('*', left, power_of());
      } else {
        break;
      }
    }
    return left;
  }

  std::int32_t signed_power() {
    if (take("-")) return call('-', power_of());
    return power_of();
  }

  bool begins_atom() {
    skip();
    const char c = peek();
    if (c == '|') return bars_ == 0;
    return is_letter(c) || is_digit(c) || c == '(' || c == '{' || c == '[' || c == '\\' || c == '.';
  }

  std::int32_t power_of() {
    std::int32_t base = atom();
    while (!failed_) {
      if (take("!")) {
        base = call('!', base);
      } else if (take("^") || take("**")) {
        const Depth depth(depth_);
        if (depth_ > kMostDepth) return fail();
        base = call('^', base, take("{") ? closed_by("}") : signed_power());
      } else {
        break;
      }
    }
    return base;
  }

  std::int32_t closed_by(std::string_view close) {
    const int bars = std::exchange(bars_, 0);
    const std::int32_t value = sum();
    bars_ = bars;
    return take(close) ? value : fail();
  }

  std::int32_t argument() {
    if (take("{")) return closed_by("}");
    skip();
    // \frac12: one digit or letter each.
    if (is_digit(peek())) return number(text_[at_++] - '0');
    return atom();
  }

  std::int32_t atom() {
    const Depth depth(depth_);
    if (failed_ || depth_ > kMostDepth) return fail();
    skip();
    const char c = peek();
    if (is_digit(c) || c == '.') return literal();
    if (take("(")) return closed_by(")");
    if (take("[")) return closed_by("]");
    if (take("{")) return closed_by("}");
    if (take("|") || take("\\lvert")) {
      ++bars_;
      const std::int32_t value = sum();
      --bars_;
      if (!take("|") && !take("\\rvert")) return fail();
      return function("abs", value);
    }
    if (c == '\\') return command();
    return is_letter(c) ? word() : fail();
  }

  std::int32_t literal() {
    // Fractions are the product's business here: 1/2x is (1/2) x.
    std::size_t end = at_;
    while (end < text_.size() && (is_digit(text_[end]) || text_[end] == '.')) ++end;
    const auto parsed = parse_number_at(text_.substr(0, end), at_);
    if (!parsed || parsed->end != end) return fail();
    at_ = end;
    Node node;
    node.number = parsed->number;
    return push(std::move(node));
  }

  std::int32_t function(std::string_view name, std::int32_t operand) {
    return call(static_cast<char>(kFirstFunction + static_cast<char>(index_of(name))), operand);
  }

  /// The operand of "\sin": "{x}", "(x)", or the power that follows, with the exponent of "\sin^2
  /// x".
  std::int32_t apply(std::string_view name) {
    std::int32_t exponent = -1;
    if (take("^")) exponent = argument();
    std::int32_t base = -1;
    if (name == "log" && take("_")) base = argument();
    const std::int32_t operand = take("(")   ? closed_by(")")
                                 : take("{") ? closed_by("}")
                                             : power_of();
    std::int32_t value = -1;
    if (base >= 0) {
      value = call('/', function("ln", operand), function("ln", base));
    } else {
      value = function(name, operand);
    }
    return exponent >= 0 ? call('^', value, exponent) : value;
  }

  std::int32_t command() {
    if (take("\\frac")) {
      const std::int32_t above = argument();
      return call('/', above, argument());
    }
    if (take("\\sqrt")) {
      const std::int32_t degree = take("[") ? closed_by("]") : -1;
      const std::int32_t inside = argument();
      if (degree < 0) return function("sqrt", inside);
      return call('^', inside, call('/', number(1), degree));
    }
    if (take("\\binom")) {
      const std::int32_t n = argument();
      const std::int32_t k = argument();
      const std::int32_t rest = call('+', n, call('-', k));
      return call('/', call('!', n), call('*', call('!', k), call('!', rest)));
    }
    if (take("\\pi")) return number(std::numbers::pi);
    for (const std::string_view name : kGreek) {
      if (take("\\" + std::string(name))) return variable("\\" + std::string(name));
    }
    for (const Named& known : kFunctions) {
      if (take("\\" + std::string(known.name))) return apply(known.name);
    }
    return fail();
  }

  /// A function's name, "pi", "e", or variables of one letter in a row. Longer words are text, not
  /// products: "east" is not "seat".
  std::int32_t word() {
    std::size_t end = at_;
    while (end < text_.size() && is_letter(text_[end])) ++end;
    const std::string_view letters = text_.substr(at_, end - at_);
    for (const Named& known : kFunctions) {
      if (letters != known.name) continue;
      at_ = end;
      return apply(known.name);
    }
    if (letters == "pi") {
      at_ = end;
      return number(std::numbers::pi);
    }
    constexpr std::size_t kLongestProduct = 3;
    if (letters.size() > kLongestProduct) return fail();
    std::string name(1, text_[at_++]);
    if (name == "e") return number(std::numbers::e);
    if (peek() == '_') {
      ++at_;
      const std::size_t begin = at_;
      if (peek() == '{') {
        while (at_ < text_.size() && text_[at_] != '}') ++at_;
      }
      if (at_ < text_.size()) ++at_;
      name += "_" + std::string(text_.substr(begin, at_ - begin));
    }
    return variable(std::move(name));
  }

  std::string_view text_;
  std::size_t at_ = 0;
  int depth_ = 0, bars_ = 0;
  bool failed_ = false;
  std::vector<std::string> names_;
  Expression result_;
};

std::optional<Expression> Expression::parse(std::string_view text) {
  if (text.empty() || text.size() > kMostBytes) return {};
  return ExpressionParser(text).parse();
}

}  // namespace heddle::reward
