#include <algorithm>

#include "data/jinja/builtins.h"
#include "data/jinja/parser_base.h"

namespace heddle::data::jinja {
namespace {

using Type = Token::Type;
using Kind = Expr::Kind;
using Op = Expr::Op;

/// The operators that chain to the left, from the loosest; between levels 2 and 3 stands ~.
struct Operator {
  std::string_view text;
  Op op;
};
constexpr Operator kSums[] = {{"+", Op::kAdd}, {"-", Op::kSub}};
constexpr Operator kProducts[] = {
    {"*", Op::kMul}, {"/", Op::kDiv}, {"//", Op::kFloorDiv}, {"%", Op::kMod}};
constexpr Operator kPowers[] = {{"**", Op::kPow}};
constexpr Operator kComparisons[] = {{"==", Op::kEq}, {"!=", Op::kNe}, {"<", Op::kLt},
                                     {"<=", Op::kLe}, {">", Op::kGt},  {">=", Op::kGe}};

enum Precedence { kOr, kAnd, kSum, kProduct, kPower };

}  // namespace

ExprPtr ExpressionParser::make(Kind kind, int line) const {
  auto expr = std::make_unique<Expr>();
  expr->kind = kind;
  expr->line = line;
  return expr;
}

ExprPtr ExpressionParser::done(ExprPtr expr) const {
  int height = 0;
  const auto see = [&](const ExprPtr& part) {
    if (part) height = std::max(height, part->height);
  };
  for (const ExprPtr& part : expr->parts) see(part);
  for (const ExprPtr& part : expr->arguments.positional) see(part);
  for (const auto& [name, part] : expr->arguments.named) see(part);
  see(expr->arguments.more_positional);
  see(expr->arguments.more_named);
  expr->height = height + 1;
  if (expr->height > kHighestTree)
    fail_at(expr->line, "an expression of more than {} steps", kHighestTree);
  return expr;
}

ExprPtr ExpressionParser::expression(bool with_conditional) {
  const Level level(*this);
  ExprPtr expr = binary(kOr);
  while (with_conditional && is_name("if")) {
    ExprPtr conditional = make(Kind::kConditional, take().line);
    conditional->parts.push_back(binary(kOr));
    conditional->parts.push_back(std::move(expr));
    conditional->parts.push_back(skip_name("else") ? expression() : nullptr);
    expr = done(std::move(conditional));
  }
  return expr;
}

ExprPtr ExpressionParser::binary(int precedence) {
  const auto tighter = [&] {
    switch (precedence) {
      case kOr:
        return binary(kAnd);
      case kAnd:
        return negation();
      case kSum:
        return concatenation();
      case kProduct:
        return binary(kPower);
      default:
        return unary(true);
    }
  };
  ExprPtr left = tighter();
  for (;;) {
    const Token& token = current();
    ExprPtr node;
    if (precedence == kOr || precedence == kAnd) {
      if (!is_name(token, precedence == kOr ? "or" : "and")) return left;
      node = make(precedence == kOr ? Kind::kOr : Kind::kAnd, token.line);
    } else {
      const auto find = [&](const auto& operators) {
        for (const Operator& candidate : operators) {
          if (is_op(token, candidate.text)) {
            node = make(Kind::kBinary, token.line);
            node->op = candidate.op;
          }
        }
      };
      if (precedence == kSum) find(kSums);
      if (precedence == kProduct) find(kProducts);
      if (precedence == kPower) find(kPowers);
      if (!node) return left;
    }
    take();
    node->parts.push_back(std::move(left));
    node->parts.push_back(tighter());
    left = done(std::move(node));
  }
}

ExprPtr ExpressionParser::negation() {
  if (!is_name("not")) return comparison();
  const Level level(*this);
  ExprPtr node = make(Kind::kNot, take().line);
  node->parts.push_back(negation());
  return done(std::move(node));
}

ExprPtr ExpressionParser::comparison() {
  ExprPtr first = binary(kSum);
  ExprPtr node;
  for (;;) {
    Op op = Op::kEq;
    bool found = false;
    for (const Operator& candidate : kComparisons) {
      if (is_op(candidate.text)) {
        op = candidate.op;
        found = true;
      }
    }
    const int line = current().line;
    if (found) {
      take();
    } else if (skip_name("in")) {
      op = Op::kIn;
    } else if (is_name("not") && is_name(look(), "in")) {
      take();
      take();
      op = Op::kNotIn;
    } else {
      break;
    }
    if (!node) {
      node = make(Kind::kCompare, line);
      node->parts.push_back(std::move(first));
    }
    node->ops.push_back(op);
    node->parts.push_back(binary(kSum));
  }
  return node ? done(std::move(node)) : std::move(first);
}

ExprPtr ExpressionParser::concatenation() {
  ExprPtr first = binary(kProduct);
  if (!is_op("~")) return first;
  ExprPtr node = make(Kind::kConcat, current().line);
  node->parts.push_back(std::move(first));
  while (skip_op("~")) node->parts.push_back(binary(kProduct));
  return done(std::move(node));
}

ExprPtr ExpressionParser::unary(bool with_filters) {
  ExprPtr node;
  if (is_op("-") || is_op("+")) {
    const Level level(*this);
    const Token& sign = take();
    node = make(sign.text == "-" ? Kind::kNegative : Kind::kPositive, sign.line);
    node->parts.push_back(unary(false));
    node = done(std::move(node));
  } else {
    node = primary();
  }
  node = postfix(std::move(node));
  return with_filters ? filters_and_tests(std::move(node)) : std::move(node);
}

ExprPtr ExpressionParser::primary() {
  const Token& token = current();
  ExprPtr node = make(Kind::kConstant, token.line);
  switch (token.type) {
    case Type::kName:
      take();
      if (token.text == "true" || token.text == "True" || token.text == "false" ||
          token.text == "False") {
        node->constant = Value::boolean(token.text == "true" || token.text == "True");
      } else if (token.text == "none" || token.text == "None") {
        node->constant = Value::none();
      } else {
        node->kind = Kind::kName;
        node->name = token.text;
        node->symbol = symbol(token.text);
      }
      return node;
    case Type::kString: {
      std::string text;
      while (is(Type::kString)) text += take().text;  // strings side by side are one
      node->constant = Value::string(std::move(text));
      return node;
    }
    case Type::kInteger:
      node->constant = Value::integer(take().integer);
      return node;
    case Type::kFloat:
      node->constant = Value::real(take().real);
      return node;
    default:
      break;
  }
  if (skip_op("(")) {
    node = tuple(true, true);
    expect_op(")");
    return node;
  }
  const Level level(*this);
  if (skip_op("[")) {
    node->kind = Kind::kList;
    while (!is_op("]")) {
      if (!node->parts.empty()) {
        expect_op(",");
        if (is_op("]")) break;
      }
      node->parts.push_back(expression());
    }
    expect_op("]");
    return done(std::move(node));
  }
  if (skip_op("{")) {
    node->kind = Kind::kDict;
    while (!is_op("}")) {
      if (!node->parts.empty()) {
        expect_op(",");
        if (is_op("}")) break;
      }
      node->parts.push_back(expression());
      expect_op(":");
      node->parts.push_back(expression());
    }
    expect_op("}");
    return done(std::move(node));
  }
  fail("unexpected {}, expected an expression", describe(token));
}

ExprPtr ExpressionParser::tuple(bool with_conditional, bool in_parentheses,
                                std::string_view end_name) {
  const int line = current().line;
  std::vector<ExprPtr> parts;
  bool is_tuple = false;
  for (;;) {
    if (!parts.empty()) expect_op(",");
    if (is(Type::kVariableEnd) || is(Type::kBlockEnd) || is_op(")") ||
        (!end_name.empty() && is_name(end_name)))
      break;
    parts.push_back(expression(with_conditional));
    if (!is_op(",")) break;
    is_tuple = true;
  }
  if (!is_tuple) {
    if (!parts.empty()) return std::move(parts[0]);
    if (!in_parentheses) fail("expected an expression, found {}", describe(current()));
  }
  ExprPtr node = make(Kind::kTuple, line);
  node->parts = std::move(parts);
  return done(std::move(node));
}

ExprPtr ExpressionParser::postfix(ExprPtr expr) {
  for (;;) {
    if (is_op(".") || is_op("[")) {
      expr = subscript(std::move(expr));
    } else if (is_op("(")) {
      expr = call(std::move(expr));
    } else {
      return expr;
    }
  }
}

ExprPtr ExpressionParser::filters_and_tests(ExprPtr expr) {
  for (;;) {
    if (is_op("|")) {
      expr = filter_chain(std::move(expr), false);
    } else if (is_name("is")) {
      expr = test(std::move(expr));
    } else if (is_op("(")) {
      expr = call(std::move(expr));
    } else {
      return expr;
    }
  }
}

ExprPtr ExpressionParser::subscript(ExprPtr subject) {
  const Token& token = take();
  ExprPtr node = make(Kind::kItem, token.line);
  node->parts.push_back(std::move(subject));
  if (token.text == ".") {
    const Token& name = take();
    if (name.type == Type::kName) {
      node->kind = Kind::kAttribute;
      node->name = name.text;
    } else if (name.type == Type::kInteger) {
      ExprPtr index = make(Kind::kConstant, name.line);
      index->constant = Value::integer(name.integer);
      node->parts.push_back(std::move(index));
    } else {
      fail_at(name.line, "expected a name or a number after '.', found {}", describe(name));
    }
    return done(std::move(node));
  }
  const auto bound = [&]() -> ExprPtr {
    return is_op(":") || is_op("]") || is_op(",") ? nullptr : expression();
  };
  ExprPtr begin = bound();
  if (is_op(":")) {
    take();
    node->kind = Kind::kSlice;
    node->parts.push_back(std::move(begin));
    node->parts.push_back(bound());
    node->parts.push_back(skip_op(":") ? bound() : nullptr);
  } else {
    if (!begin) fail("expected a subscript, found {}", describe(current()));
    node->parts.push_back(std::move(begin));
  }
  if (is_op(",")) fail("a subscript of several parts is not supported");
  expect_op("]");
  return done(std::move(node));
}

void ExpressionParser::arguments(Arguments& out) {
  const int line = current().line;
  expect_op("(");
  bool first = true;
  while (!is_op(")")) {
    if (!first) {
      expect_op(",");
      if (is_op(")")) break;
    }
    first = false;
    if (skip_op("*")) {
      if (out.more_positional || out.more_named) fail_at(line, "invalid arguments of a call");
      out.more_positional = expression();
    } else if (skip_op("**")) {
      if (out.more_named) fail_at(line, "invalid arguments of a call");
      out.more_named = expression();
    } else if (is(Type::kName) && is_op(look(), "=")) {
      if (out.more_named) fail_at(line, "invalid arguments of a call");
      std::string name = take().text;
      take();
      out.named.emplace_back(std::move(name), expression());
    } else {
      if (out.more_positional || out.more_named || !out.named.empty())
        fail_at(line, "invalid arguments of a call");
      out.positional.push_back(expression());
    }
  }
  expect_op(")");
}

ExprPtr ExpressionParser::call(ExprPtr callee) {
  ExprPtr node = make(Kind::kCall, current().line);
  node->parts.push_back(std::move(callee));
  arguments(node->arguments);
  return done(std::move(node));
}

ExprPtr ExpressionParser::filter_chain(ExprPtr subject, bool inline_start) {
  while (is_op("|") || inline_start) {
    if (!inline_start) take();
    inline_start = false;
    ExprPtr node = make(Kind::kFilter, current().line);
    node->name = expect_any_name();
    node->parts.push_back(std::move(subject));
    if (is_op("(")) arguments(node->arguments);
    subject = done(std::move(node));
  }
  return subject;
}

ExprPtr ExpressionParser::test(ExprPtr subject) {
  ExprPtr node = make(Kind::kTest, take().line);
  const bool negated = skip_name("not");
  node->name = expect_any_name();
  node->parts.push_back(std::move(subject));
  if (is_op("(")) {
    arguments(node->arguments);
  } else if ((is(Type::kName) && !is_name("else") && !is_name("or") && !is_name("and")) ||
             is(Type::kString) || is(Type::kInteger) || is(Type::kFloat) || is_op("[") ||
             is_op("{")) {
    if (is_name("is")) fail("several tests with 'is' cannot be chained");
    node->arguments.positional.push_back(postfix(primary()));
  }
  node = done(std::move(node));
  if (!negated) return node;
  ExprPtr negation = make(Kind::kNot, node->line);
  negation->parts.push_back(std::move(node));
  return done(std::move(negation));
}

}  // namespace heddle::data::jinja
