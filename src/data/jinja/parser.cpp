#include "data/jinja/parser.h"

#include "data/jinja/builtins.h"
#include "data/jinja/parser_base.h"

namespace heddle::data::jinja {
namespace {

using Type = Token::Type;
using StatementPtr = std::unique_ptr<Statement>;

class Parser : public ExpressionParser {
 public:
  Parser(std::string_view source, const std::string& name) : ExpressionParser(source, name) {
    // In the order of Template::Symbol.
    for (const char* fixed : {"loop", "caller", "varargs", "kwargs", "messages", "tools",
                              "documents", "add_generation_prompt"}) {
      symbol(fixed);
    }
  }

  std::shared_ptr<const Template> run() {
    auto result = std::make_shared<Template>();
    result->name = name_;
    result->body = body({});
    result->symbols = std::move(symbols_);
    result->has_generation = has_generation_;
    return result;
  }

 private:
  static StatementPtr make(Statement::Kind kind, int line) {
    auto statement = std::make_unique<Statement>();
    statement->kind = kind;
    statement->line = line;
    return statement;
  }

  /// Statements up to a block that begins with one of `ends` (whose name is then the current
  /// token), or to the end of the template if there are none.
  Body body(std::initializer_list<std::string_view> ends, int begin_line = 1) {
    const Level level(*this);
    Body out;
    for (;;) {
      switch (current().type) {
        case Type::kData: {
          StatementPtr text = make(Statement::Kind::kText, current().line);
          text->text = take().text;
          out.push_back(std::move(text));
          break;
        }
        case Type::kVariableBegin: {
          StatementPtr output = make(Statement::Kind::kOutput, take().line);
          output->expr = tuple(true, false);
          expect(Type::kVariableEnd, "'}}'");
          out.push_back(std::move(output));
          break;
        }
        case Type::kBlockBegin: {
          take();
          for (const std::string_view end : ends) {
            if (is_name(end)) return out;
          }
          statement(out);
          expect(Type::kBlockEnd, "'%}'");
          break;
        }
        default:
          if (ends.size() != 0) {
            fail("the block that begins on line {} is not closed: expected '{}'", begin_line,
                 *(ends.end() - 1));
          }
          return out;
      }
    }
  }

  /// The body of a block statement: from the end of its opening tag; leaves the closing name as
  /// current token.
  Body block(std::initializer_list<std::string_view> ends) {
    skip_op(":");
    const int line = current().line;
    expect(Type::kBlockEnd, "'%}'");
    return body(ends, line);
  }
  Body whole_block(std::string_view end) {
    Body out = block({end});
    take();
    return out;
  }

  void statement(Body& out) {
    if (!is(Type::kName)) fail("expected the name of a statement, found {}", describe(current()));
    const Token& token = current();
    const std::string& name = token.text;
    if (name == "if") {
      out.push_back(if_statement());
    } else if (name == "for") {
      out.push_back(for_statement());
    } else if (name == "set") {
      out.push_back(set_statement());
    } else if (name == "macro") {
      out.push_back(macro_statement());
    } else if (name == "call") {
      out.push_back(call_statement());
    } else if (name == "filter") {
      StatementPtr filter = make(Statement::Kind::kFilterBlock, take().line);
      filter->expr = filter_chain(nullptr, true);
      filter->body = whole_block("endfilter");
      out.push_back(std::move(filter));
    } else if (name == "with") {
      StatementPtr with = make(Statement::Kind::kWith, take().line);
      while (!is(Type::kBlockEnd)) {
        if (!with->targets.empty()) expect_op(",");
        with->targets.push_back(target({}, false));
        expect_op("=");
        with->values.push_back(expression());
      }
      with->body = whole_block("endwith");
      out.push_back(std::move(with));
    } else if (name == "generation") {
      StatementPtr generation = make(Statement::Kind::kGeneration, take().line);
      if (captures_ > 0) {
        fail_at(
            generation->line,
            "a generation block inside a macro, call, filter or set block is not supported: its "
            "place in the text is not known");
      }
      has_generation_ = true;
      const int loops = std::exchange(loops_, 0);
      generation->body = whole_block("endgeneration");
      loops_ = loops;
      out.push_back(std::move(generation));
    } else if (name == "break" || name == "continue") {
      if (loops_ == 0) fail("'{}' outside of a loop", name);
      out.push_back(make(name == "break" ? Statement::Kind::kBreak : Statement::Kind::kContinue,
                         take().line));
    } else if (name == "print") {
      take();
      while (!is(Type::kBlockEnd)) {
        StatementPtr output = make(Statement::Kind::kOutput, current().line);
        output->expr = expression();
        out.push_back(std::move(output));
        if (!is(Type::kBlockEnd)) expect_op(",");
      }
    } else {
      constexpr std::string_view kUnsupported[] = {"block", "extends",    "include", "import",
                                                   "from",  "autoescape", "do",      "trans"};
      for (const std::string_view unsupported : kUnsupported) {
        if (name == unsupported) fail("the statement '{}' is not supported", name);
      }
      fail("unknown statement '{}'", name);
    }
  }

  StatementPtr if_statement() {
    StatementPtr out = make(Statement::Kind::kIf, take().line);
    for (;;) {
      ExprPtr condition = tuple(false, false);
      Body then = block({"elif", "else", "endif"});
      out->branches.emplace_back(std::move(condition), std::move(then));
      const std::string& name = take().text;
      if (name == "elif") continue;
      if (name == "else") out->branches.emplace_back(nullptr, whole_block("endif"));
      return out;
    }
  }

  StatementPtr for_statement() {
    StatementPtr out = make(Statement::Kind::kFor, take().line);
    out->target = target("in", false);
    expect_name("in");
    out->expr = tuple(false, false, "recursive");
    if (skip_name("if")) out->condition = expression();
    if (is_name("recursive")) fail("a recursive loop is not supported");
    ++loops_;
    out->body = block({"else", "endfor"});
    --loops_;
    if (take().text == "else") out->other = whole_block("endfor");
    return out;
  }

  StatementPtr set_statement() {
    const int line = take().line;
    Target to = target({}, true);
    if (skip_op("=")) {
      StatementPtr out = make(Statement::Kind::kSet, line);
      out->target = std::move(to);
      out->expr = tuple(true, false);
      return out;
    }
    StatementPtr out = make(Statement::Kind::kSetBlock, line);
    out->target = std::move(to);
    out->expr = filter_chain(nullptr, false);
    ++captures_;
    const int loops = std::exchange(loops_, 0);
    out->body = whole_block("endset");
    loops_ = loops;
    --captures_;
    return out;
  }

  void signature(MacroDefinition& macro) {
    expect_op("(");
    while (!is_op(")")) {
      if (!macro.parameters.empty()) expect_op(",");
      const std::string name = expect_any_name();
      macro.parameters.emplace_back(symbol(name), name);
      if (skip_op("=")) {
        macro.defaults.push_back(expression());
      } else if (!macro.defaults.empty()) {
        fail("a parameter without default after one with a default");
      }
    }
    expect_op(")");
  }

  void macro_body(MacroDefinition& macro, std::string_view end) {
    const std::size_t begin = at_;
    ++captures_;
    const int loops = std::exchange(loops_, 0);
    macro.body = whole_block(end);
    loops_ = loops;
    --captures_;
    for (std::size_t i = begin; i < at_; ++i) {
      macro.uses_caller |= ParserBase::is_name(tokens_[i], "caller");
      macro.uses_varargs |= ParserBase::is_name(tokens_[i], "varargs");
      macro.uses_kwargs |= ParserBase::is_name(tokens_[i], "kwargs");
    }
  }

  StatementPtr macro_statement() {
    StatementPtr out = make(Statement::Kind::kMacro, take().line);
    out->macro = std::make_unique<MacroDefinition>();
    out->macro->name = expect_any_name();
    out->symbol = symbol(out->macro->name);
    signature(*out->macro);
    macro_body(*out->macro, "endmacro");
    return out;
  }

  StatementPtr call_statement() {
    StatementPtr out = make(Statement::Kind::kCallBlock, take().line);
    out->macro = std::make_unique<MacroDefinition>();
    out->macro->name = "caller";
    if (is_op("(")) signature(*out->macro);
    out->expr = expression();
    if (out->expr->kind != Expr::Kind::kCall) fail_at(out->line, "expected a call after 'call'");
    macro_body(*out->macro, "endcall");
    return out;
  }

  Target single_target(bool may_be_namespace) {
    const Level level(*this);
    if (skip_op("(")) {
      Target inner = target({}, may_be_namespace);
      expect_op(")");
      return inner;
    }
    Target out;
    const int line = current().line;
    out.name = expect_any_name();
    for (const std::string_view reserved : {"true", "false", "none", "True", "False", "None"}) {
      if (out.name == reserved) fail_at(line, "'{}' cannot be assigned to", out.name);
    }
    out.symbol = symbol(out.name);
    if (may_be_namespace && skip_op(".")) {
      out.kind = Target::Kind::kNamespace;
      out.attribute = expect_any_name();
    } else if (is_op("[") || is_op(".")) {
      fail_at(line, "only names and attributes of a namespace can be assigned to");
    }
    return out;
  }

  /// A name, a namespace's attribute, or several with commas. Ends before `end_name`.
  Target target(std::string_view end_name, bool may_be_namespace) {
    Target first = single_target(may_be_namespace);
    if (!is_op(",")) return first;
    Target out;
    out.kind = Target::Kind::kTuple;
    out.parts.push_back(std::move(first));
    while (skip_op(",")) {
      if ((!end_name.empty() && is_name(end_name)) || is_op("=") || is_op(")")) break;
      out.parts.push_back(single_target(may_be_namespace));
    }
    return out;
  }

  bool has_generation_ = false;
  int captures_ = 0;
  int loops_ = 0;
};

}  // namespace

std::shared_ptr<const Template> parse_template(std::string_view source, const std::string& name) {
  return Parser(source, name).run();
}

}  // namespace heddle::data::jinja
