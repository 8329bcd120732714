#pragma once

#include <string>
#include <string_view>
#include <unordered_map>
#include <vector>

#include "base/errors.h"
#include "data/jinja/ast.h"
#include "data/jinja/lexer.h"

namespace heddle::data::jinja {

/// The token stream with what statements and expressions both need.
class ParserBase {
 protected:
  ParserBase(std::string_view source, const std::string& name)
      : name_(name), tokens_(tokenize(source, name)) {}

  // Bounds on recursion: of the parser, of the tree that the interpreter walks and that is
  // destroyed at the end.
  static constexpr int kDeepestNesting = 100;
  static constexpr int kHighestTree = 400;

  const Token& current() const { return tokens_[at_]; }
  const Token& look() const { return tokens_[at_ + 1 < tokens_.size() ? at_ + 1 : at_]; }
  const Token& take() {
    const Token& token = tokens_[at_];
    if (at_ + 1 < tokens_.size()) ++at_;
    return token;
  }
  bool is(Token::Type type) const { return current().type == type; }
  static bool is_op(const Token& token, std::string_view text) {
    return token.type == Token::Type::kOperator && token.text == text;
  }
  static bool is_name(const Token& token, std::string_view text) {
    return token.type == Token::Type::kName && token.text == text;
  }
  bool is_op(std::string_view text) const { return is_op(current(), text); }
  bool is_name(std::string_view text) const { return is_name(current(), text); }
  bool skip_op(std::string_view text) {
    if (!is_op(text)) return false;
    take();
    return true;
  }
  bool skip_name(std::string_view text) {
    if (!is_name(text)) return false;
    take();
    return true;
  }
  void expect_op(std::string_view text) {
    if (!skip_op(text)) fail("expected '{}', found {}", text, describe(current()));
  }
  void expect_name(std::string_view text) {
    if (!skip_name(text)) fail("expected '{}', found {}", text, describe(current()));
  }
  std::string expect_any_name() {
    if (!is(Token::Type::kName)) fail("expected a name, found {}", describe(current()));
    return take().text;
  }
  void expect(Token::Type type, std::string_view what) {
    if (!is(type)) fail("expected {}, found {}", what, describe(current()));
    take();
  }

  static std::string describe(const Token& token) {
    switch (token.type) {
      case Token::Type::kData:
        return "text";
      case Token::Type::kBlockBegin:
        return "'{%'";
      case Token::Type::kBlockEnd:
        return "'%}'";
      case Token::Type::kVariableBegin:
        return "'{{'";
      case Token::Type::kVariableEnd:
        return "'}}'";
      case Token::Type::kString:
        return "a string";
      case Token::Type::kEnd:
        return "the end of the template";
      default:
        return "'" + token.text + "'";
    }
  }

  template <class... Args>
  [[noreturn]] void fail_at(int line, fmt::format_string<Args...> format, Args&&... args) const {
    throw_error<DataError>("{}:{}: {}", name_, line,
                           fmt::format(format, std::forward<Args>(args)...));
  }
  template <class... Args>
  [[noreturn]] void fail(fmt::format_string<Args...> format, Args&&... args) const {
    fail_at(current().line, format, std::forward<Args>(args)...);
  }

  int symbol(const std::string& name) {
    const auto [found, is_new] = symbol_ids_.try_emplace(name, static_cast<int>(symbols_.size()));
    if (is_new) symbols_.push_back(name);
    return found->second;
  }

  /// Counts one level of nesting while it lives.
  class Level {
   public:
    explicit Level(ParserBase& parser) : parser_(parser) {
      if (++parser_.level_ > kDeepestNesting)
        parser_.fail("nested deeper than {} levels", kDeepestNesting);
    }
    ~Level() { --parser_.level_; }
    Level(const Level&) = delete;
    Level& operator=(const Level&) = delete;

   private:
    ParserBase& parser_;
  };

  const std::string& name_;
  std::vector<Token> tokens_;
  std::size_t at_ = 0;
  int level_ = 0;
  std::vector<std::string> symbols_;
  std::unordered_map<std::string, int> symbol_ids_;
};

/// Expressions, by precedence from the loosest: x if c else y; or; and; not; comparisons; + -; ~; *
/// / // %; **; signs; calls, subscripts, filters and tests.
class ExpressionParser : public ParserBase {
 protected:
  using ParserBase::ParserBase;

  ExprPtr expression(bool with_conditional = true);
  /// An expression, or several with commas between them: a tuple. Ends before one of `end_names`.
  ExprPtr tuple(bool with_conditional, bool in_parentheses, std::string_view end_name = {});
  ExprPtr primary();
  ExprPtr postfix(ExprPtr expr);
  /// A chain of filters that starts at the current token; `inline_start`: the first has no '|'.
  ExprPtr filter_chain(ExprPtr subject, bool inline_start);
  /// Finishes a node: its height is known.
  ExprPtr done(ExprPtr expr) const;
  ExprPtr make(Expr::Kind kind, int line) const;

 private:
  ExprPtr binary(int precedence);
  ExprPtr negation();
  ExprPtr comparison();
  ExprPtr concatenation();
  ExprPtr unary(bool with_filters);
  ExprPtr filters_and_tests(ExprPtr expr);
  ExprPtr test(ExprPtr subject);
  ExprPtr subscript(ExprPtr subject);
  ExprPtr call(ExprPtr callee);
  void arguments(Arguments& out);
};

}  // namespace heddle::data::jinja
