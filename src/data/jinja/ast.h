#pragma once

#include <memory>
#include <string>
#include <utility>
#include <vector>

#include "data/jinja/value.h"

/// The syntax tree of a template. Names are numbered by the parser, so that a scope looks up
/// integers.
namespace heddle::data::jinja {

struct Expr;
struct Statement;
using ExprPtr = std::unique_ptr<Expr>;
using Body = std::vector<std::unique_ptr<Statement>>;

struct Arguments {
  std::vector<ExprPtr> positional;
  std::vector<std::pair<std::string, ExprPtr>> named;
  ExprPtr more_positional;  // *expr
  ExprPtr more_named;       // **expr
};

struct Expr {
  enum class Kind {
    kConstant,     // constant
    kName,         // symbol, name
    kList,         // parts
    kTuple,        // parts
    kDict,         // parts: key, value, key, value, ...
    kAttribute,    // parts[0].name
    kItem,         // parts[0][parts[1]]
    kSlice,        // parts[0][parts[1]:parts[2]:parts[3]], null where absent
    kCall,         // parts[0](arguments)
    kFilter,       // parts[0]|name(arguments); parts[0] null in a filter or set block
    kTest,         // parts[0] is name(arguments)
    kNot,          // parts[0]
    kNegative,     // parts[0]
    kPositive,     // parts[0]
    kAnd,          // parts[0], parts[1]
    kOr,           // parts[0], parts[1]
    kConcat,       // parts
    kBinary,       // parts[0] op parts[1]
    kCompare,      // parts[0] ops[0] parts[1] ops[1] parts[2] ...
    kConditional,  // parts[1] if parts[0] else parts[2] (null: undefined)
  };
  enum class Op {
    kAdd,
    kSub,
    kMul,
    kDiv,
    kFloorDiv,
    kMod,
    kPow,
    kEq,
    kNe,
    kLt,
    kLe,
    kGt,
    kGe,
    kIn,
    kNotIn
  };

  Kind kind;
  int line;
  int height = 1;  // of the tree below and with this node
  int symbol = -1;
  std::string name;
  Value constant;
  Op op = Op::kAdd;
  std::vector<Op> ops;
  std::vector<ExprPtr> parts;
  Arguments arguments;
};

/// Left side of an assignment or a loop.
struct Target {
  enum class Kind { kName, kTuple, kNamespace };
  Kind kind = Kind::kName;
  int symbol = -1;
  std::string name;
  std::string attribute;  // of a namespace
  std::vector<Target> parts;
};

/// Parameters and body of a macro or of a call block.
struct MacroDefinition {
  std::string name;
  std::vector<std::pair<int, std::string>> parameters;  // symbol and name
  std::vector<ExprPtr> defaults;                        // of the last parameters
  Body body;
  bool uses_caller = false;
  bool uses_varargs = false;
  bool uses_kwargs = false;
};

struct Statement {
  enum class Kind {
    kText,         // text
    kOutput,       // expr
    kIf,           // branches (condition null: else)
    kFor,          // target, expr, condition (filter), body, other (else)
    kSet,          // target, expr
    kSetBlock,     // target, body, expr (filter chain or null)
    kMacro,        // macro, symbol
    kCallBlock,    // macro (the caller), expr (the call)
    kFilterBlock,  // expr, body
    kWith,         // targets, values, body
    kGeneration,   // body
    kBreak,
    kContinue,
  };
  Kind kind;
  int line;
  std::string text;
  int symbol = -1;
  ExprPtr expr;
  ExprPtr condition;
  Target target;
  std::vector<Target> targets;
  std::vector<ExprPtr> values;
  Body body;
  Body other;
  std::vector<std::pair<ExprPtr, Body>> branches;
  std::unique_ptr<MacroDefinition> macro;
};

/// A parsed template. Names whose meaning the engine gives (`loop`, `caller`, ...) have fixed
/// numbers.
struct Template {
  enum Symbol {
    kLoop,
    kCaller,
    kVarargs,
    kKwargs,
    kMessages,
    kTools,
    kDocuments,
    kAddGenerationPrompt,
    kFixed
  };
  std::string name;
  std::vector<std::string> symbols;
  Body body;
  bool has_generation = false;
};

}  // namespace heddle::data::jinja
