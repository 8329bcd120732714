#pragma once

#include <string>

#include "data/jinja/ast.h"

namespace heddle::data::jinja {

class Scope;

/// Something that a template can call.
struct Callable {
  enum class Kind { kFunction, kMethod, kMacro, kCycle };
  Kind kind = Kind::kFunction;
  std::string name;
  Value self;  // of a method, the loop of a cycle
  const MacroDefinition* macro = nullptr;
  Scope* scope = nullptr;  // where the macro was defined; kept by the interpreter
  Value::Extent extent() const { return {self.extent().depth + 1, self.extent().weight + 1}; }
};

/// The evaluated arguments of a call, filter or test.
struct CallArguments {
  Values positional;
  std::vector<std::pair<std::string, Value>> named;
};

}  // namespace heddle::data::jinja
