#include "data/jinja/interpreter.h"

#include <algorithm>

namespace heddle::data::jinja {

const Value* Scope::own(int symbol) const {
  if (index_) {
    const auto found = index_->find(symbol);
    return found == index_->end() ? nullptr : &values_[found->second].second;
  }
  for (const auto& [known, value] : values_) {
    if (known == symbol) return &value;
  }
  return nullptr;
}

const Value* Scope::find(int symbol) const {
  for (const Scope* scope = this; scope != nullptr; scope = scope->outer_) {
    if (const Value* value = scope->own(symbol)) return value;
  }
  return nullptr;
}

void Scope::set(int symbol, Value value) {
  constexpr std::size_t kIndexedFrom = 32;
  if (const Value* old = own(symbol)) {
    const_cast<Value&>(*old) = std::move(value);
    return;
  }
  values_.emplace_back(symbol, std::move(value));
  if (index_) {
    index_->emplace(symbol, values_.size() - 1);
  } else if (values_.size() >= kIndexedFrom) {
    index_ = std::make_unique<std::unordered_map<int, std::size_t>>();
    for (std::size_t i = 0; i < values_.size(); ++i) index_->emplace(values_[i].first, i);
  }
}

void Scope::keep() {
  for (Scope* scope = this; scope != nullptr && !scope->is_kept_; scope = scope->outer_)
    scope->is_kept_ = true;
}

class Interpreter::InnerScope {
 public:
  InnerScope(Interpreter& interpreter, Scope* outer)
      : interpreter_(interpreter),
        scope_(std::make_unique<Scope>(outer)),
        before_(interpreter.scope_) {
    interpreter_.scope_ = scope_.get();
  }
  ~InnerScope() {
    interpreter_.scope_ = before_;
    if (scope_->is_kept()) interpreter_.kept_scopes_.push_back(std::move(scope_));
  }
  InnerScope(const InnerScope&) = delete;
  InnerScope& operator=(const InnerScope&) = delete;

 private:
  Interpreter& interpreter_;
  std::unique_ptr<Scope> scope_;
  Scope* before_;
};

Interpreter::~Interpreter() = default;

void Interpreter::work(std::uint64_t items) {
  steps_ += items;
  if (steps_ > limits_.max_steps) fail("rendering takes more than {} steps", limits_.max_steps);
}

void Interpreter::built(std::size_t bytes) {
  bytes_built_ += bytes;
  if (bytes_built_ > limits_.max_built)
    fail("rendering builds more than {} bytes of text", limits_.max_built);
}

std::uint64_t Interpreter::cost_of_comparing(const Value& a, const Value& b) {
  return a.kind() == b.kind() ? std::min(cost(a), cost(b)) : 1;
}

std::uint64_t Interpreter::cost_of_finding(const Value& what, const Value& container) {
  using Kind = Value::Kind;
  switch (container.kind()) {
    case Kind::kString:
      // A text may match almost wholly at every place.
      return cost(container) * (1 + (what.is_string() ? what.as_string().size() / 64 : 0));
    case Kind::kDict:
      return what.is_string() ? 1 : cost(container);
    case Kind::kList:
      return std::min(cost(container), container.as_list().items.size() * cost(what));
    default:
      return cost(container);
  }
}

Values Interpreter::items_of(const Value& value) {
  // Each character of a text becomes a value of its own.
  constexpr std::size_t kCharacter = 8;
  if (value.is_string()) work(value.as_string().size() * kCharacter);
  Values items = iterate(value);
  work(items.size());
  return items;
}

Namespace* Interpreter::make_namespace() {
  namespaces_.push_back(std::make_unique<Namespace>());
  return namespaces_.back().get();
}

void Interpreter::fail_undefined(const Undefined& value) const {
  if (value.name == nullptr) fail("an undefined value is used");
  if (value.is_attribute) fail("a value has no attribute or key '{}'", *value.name);
  fail("'{}' is undefined", *value.name);
}

std::string Interpreter::run(std::vector<std::pair<std::string, Value>> variables,
                             std::vector<std::pair<std::size_t, std::size_t>>& generation_spans,
                             std::vector<Pass>& passes) {
  std::string out;
  passes_ = &passes;
  whole_ = &out;
  try {
    const InnerScope given(*this, nullptr);
    std::unordered_map<std::string_view, Value*> by_name;
    for (auto& [name, value] : variables) by_name[name] = &value;
    for (std::size_t i = 0; i < template_.symbols.size(); ++i) {
      if (const auto found = by_name.find(template_.symbols[i]); found != by_name.end())
        scope_->set(static_cast<int>(i), std::move(*found->second));
    }
    const InnerScope top(*this, scope_);
    out_ = &out;
    spans_ = &generation_spans;
    run(template_.body);
  } catch (const TypeError& error) {
    fail("{}", error.message);
  }
  return out;
}

void Interpreter::write(std::string_view text) {
  built(text.size());
  out_->append(text);
}

Interpreter::Flow Interpreter::run(const Body& body) {
  for (const auto& statement : body) {
    const Flow flow = run(*statement);
    if (flow != Flow::kNormal) return flow;
  }
  return Flow::kNormal;
}

Interpreter::Flow Interpreter::run(const Statement& statement) {
  using Kind = Statement::Kind;
  const Depth depth(*this);
  line_ = statement.line;
  switch (statement.kind) {
    case Kind::kText:
      write(statement.text);
      break;
    case Kind::kOutput:
      write(to_text(evaluate(*statement.expr), max_bytes()));
      break;
    case Kind::kIf:
      return run_if(statement);
    case Kind::kFor:
      return run_for(statement);
    case Kind::kSet:
      assign(statement.target, evaluate(*statement.expr));
      break;
    case Kind::kSetBlock:
      run_set_block(statement);
      break;
    case Kind::kMacro:
      run_macro_definition(statement);
      break;
    case Kind::kCallBlock:
      run_call_block(statement);
      break;
    case Kind::kFilterBlock:
      run_filter_block(statement);
      break;
    case Kind::kWith:
      return run_with(statement);
    case Kind::kGeneration:
      return run_generation(statement);
    case Kind::kBreak:
      return Flow::kBreak;
    case Kind::kContinue:
      return Flow::kContinue;
  }
  return Flow::kNormal;
}

Interpreter::Flow Interpreter::run_if(const Statement& statement) {
  for (const auto& [condition, body] : statement.branches) {
    if (!condition || evaluate(*condition).truthy()) return run(body);
  }
  return Flow::kNormal;
}

Interpreter::Flow Interpreter::run_for(const Statement& statement) {
  auto loop = std::make_shared<LoopData>();
  loop->items = items_of(evaluate(*statement.expr));
  if (statement.condition) {
    Values chosen;
    for (Value& item : loop->items) {
      const InnerScope inner(*this, scope_);
      assign(statement.target, item);
      if (evaluate(*statement.condition).truthy()) chosen.push_back(item);
    }
    loop->items = std::move(chosen);
  }
  for (const Value& item : loop->items)
    loop->extent.depth = std::max(loop->extent.depth, item.extent().depth + 1);
  if (loop->items.empty()) {
    const InnerScope inner(*this, scope_);
    return run(statement.other);
  }
  for (loop->index = 0; loop->index < loop->items.size(); ++loop->index) {
    line_ = statement.line;
    work(1);
    const InnerScope inner(*this, scope_);
    scope_->set(Template::kLoop, Value::from(loop));
    const Value& item = loop->items[loop->index];
    assign(statement.target, item);
    const std::size_t begin = out_->size();
    const Flow flow = run(statement.body);
    if (item.is_dict() && out_ == whole_ && out_->size() > begin) {
      passes_->push_back({&item.as_dict(), begin, out_->size()});
    }
    if (flow == Flow::kBreak) break;
  }
  return Flow::kNormal;
}

std::string Interpreter::captured(const Body& body) {
  const InnerScope inner(*this, scope_);
  std::string text;
  std::string* const before = std::exchange(out_, &text);
  try {
    run(body);
  } catch (...) {
    out_ = before;
    throw;
  }
  out_ = before;
  return text;
}

void Interpreter::run_set_block(const Statement& statement) {
  Value value = Value::string(captured(statement.body));
  if (statement.expr) value = evaluate_filter(*statement.expr, &value);
  assign(statement.target, value);
}

void Interpreter::run_filter_block(const Statement& statement) {
  const Value value = Value::string(captured(statement.body));
  write(to_text(evaluate_filter(*statement.expr, &value), max_bytes()));
}

Interpreter::Flow Interpreter::run_with(const Statement& statement) {
  Values values;
  for (const ExprPtr& value : statement.values) values.push_back(evaluate(*value));
  const InnerScope inner(*this, scope_);
  for (std::size_t i = 0; i < values.size(); ++i) assign(statement.targets[i], values[i]);
  return run(statement.body);
}

void Interpreter::run_macro_definition(const Statement& statement) {
  auto callable = std::make_shared<Callable>();
  callable->kind = Callable::Kind::kMacro;
  callable->name = statement.macro->name;
  callable->macro = statement.macro.get();
  callable->scope = scope_;
  scope_->keep();
  scope_->set(statement.symbol, Value::from(std::shared_ptr<const Callable>(std::move(callable))));
}

void Interpreter::run_call_block(const Statement& statement) {
  auto caller = std::make_shared<Callable>();
  caller->kind = Callable::Kind::kMacro;
  caller->name = "caller";
  caller->macro = statement.macro.get();
  caller->scope = scope_;
  scope_->keep();
  const Value callee = evaluate(*statement.expr->parts[0]);
  CallArguments arguments = evaluate(statement.expr->arguments);
  arguments.named.emplace_back("caller",
                               Value::from(std::shared_ptr<const Callable>(std::move(caller))));
  write(to_text(call(callee, arguments), max_bytes()));
}

Interpreter::Flow Interpreter::run_generation(const Statement& statement) {
  const std::size_t begin = out_->size();
  const InnerScope inner(*this, scope_);
  const Flow flow = run(statement.body);
  spans_->emplace_back(begin, out_->size());
  return flow;
}

void Interpreter::assign(const Target& target, const Value& value) {
  switch (target.kind) {
    case Target::Kind::kName:
      scope_->set(target.symbol, value);
      return;
    case Target::Kind::kNamespace: {
      const Value* space = scope_->find(target.symbol);
      if (space == nullptr || !space->is(Value::Kind::kNamespace)) {
        fail("cannot assign attribute '{}': '{}' is not a namespace", target.attribute,
             target.name);
      }
      if (target.attribute.starts_with('_'))
        fail("a namespace cannot have an attribute '{}'", target.attribute);
      space->as_namespace().values[target.attribute] = value;
      return;
    }
    case Target::Kind::kTuple: {
      const Values items = items_of(value);
      if (items.size() != target.parts.size()) {
        fail("cannot unpack {} values into {} names", items.size(), target.parts.size());
      }
      for (std::size_t i = 0; i < items.size(); ++i) assign(target.parts[i], items[i]);
      return;
    }
  }
}

Value Interpreter::call_macro(const Callable& callable, const CallArguments& arguments) {
  const Depth depth(*this);
  const MacroDefinition& macro = *callable.macro;
  const int line = line_;
  const InnerScope inner(*this, callable.scope);
  const std::size_t count = macro.parameters.size();
  std::vector<bool> given(count, false);
  for (std::size_t i = 0; i < count && i < arguments.positional.size(); ++i) {
    scope_->set(macro.parameters[i].first, arguments.positional[i]);
    given[i] = true;
  }
  if (arguments.positional.size() > count && !macro.uses_varargs) {
    fail("macro '{}' takes not more than {} arguments", macro.name, count);
  }
  std::vector<std::pair<Value, Value>> rest;
  bool has_caller = false;
  for (const auto& [name, value] : arguments.named) {
    bool known = false;
    for (std::size_t i = 0; i < count; ++i) {
      if (macro.parameters[i].second != name) continue;
      if (given[i]) fail("macro '{}' got multiple values for argument '{}'", macro.name, name);
      scope_->set(macro.parameters[i].first, value);
      given[i] = known = true;
    }
    if (known) continue;
    if (name == "caller" && macro.uses_caller) {
      scope_->set(Template::kCaller, value);
      has_caller = true;
    } else if (macro.uses_kwargs) {
      rest.emplace_back(Value::string(name), value);
    } else {
      fail("macro '{}' takes no keyword argument '{}'", macro.name, name);
    }
  }
  const std::size_t first_default = count - macro.defaults.size();
  for (std::size_t i = 0; i < count; ++i) {
    if (given[i]) continue;
    scope_->set(macro.parameters[i].first, i >= first_default
                                               ? evaluate(*macro.defaults[i - first_default])
                                               : Value::undefined(&macro.parameters[i].second));
  }
  if (macro.uses_caller && !has_caller && scope_->find(Template::kCaller) == nullptr) {
    scope_->set(Template::kCaller, Value::undefined(&template_.symbols[Template::kCaller]));
  }
  if (macro.uses_varargs) {
    scope_->set(Template::kVarargs, Value::tuple(arguments.positional.size() > count
                                                     ? Values(arguments.positional.begin() + count,
                                                              arguments.positional.end())
                                                     : Values()));
  }
  if (macro.uses_kwargs) scope_->set(Template::kKwargs, Value::dict(std::move(rest)));
  std::string text = captured(macro.body);
  line_ = line;
  return Value::string(std::move(text));
}

}  // namespace heddle::data::jinja
