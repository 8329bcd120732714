#include "data/jinja/interpreter.h"
#include "data/jinja/python_text.h"
#include "data/tokenizer/utf8.h"

namespace heddle::data::jinja {

using ExprKind = Expr::Kind;
using Op = Expr::Op;

namespace {

const Value* attribute_of_loop(const LoopData& loop, const std::string& name, Value& storage) {
  const auto count = static_cast<std::int64_t>(loop.items.size());
  const auto index = static_cast<std::int64_t>(loop.index);
  if (name == "index")
    storage = Value::integer(index + 1);
  else if (name == "index0")
    storage = Value::integer(index);
  else if (name == "revindex")
    storage = Value::integer(count - index);
  else if (name == "revindex0")
    storage = Value::integer(count - index - 1);
  else if (name == "first")
    storage = Value::boolean(index == 0);
  else if (name == "last")
    storage = Value::boolean(index + 1 == count);
  else if (name == "length")
    storage = Value::integer(count);
  else if (name == "depth")
    storage = Value::integer(1);  // deeper only in recursive loops
  else if (name == "depth0")
    storage = Value::integer(0);
  else if (name == "previtem")
    storage = index > 0 ? loop.items[index - 1] : Value::undefined();
  else if (name == "nextitem")
    storage = index + 1 < count ? loop.items[index + 1] : Value::undefined();
  else
    return nullptr;
  return &storage;
}

/// Python's bounds of a slice of `count` items.
struct Range {
  std::int64_t begin, end, step;
};
Range slice_range(std::int64_t count, const Value& begin, const Value& end, const Value& step) {
  const auto read = [](const Value& value, std::int64_t otherwise) {
    if (value.is_none()) return otherwise;
    if (!value.is_integral()) throw TypeError{"slice indices must be integers or None"};
    return value.as_int();
  };
  const std::int64_t stride = read(step, 1);
  if (stride == 0) throw TypeError{"slice step cannot be zero"};
  const std::int64_t lowest = stride < 0 ? -1 : 0, highest = stride < 0 ? count - 1 : count;
  const auto bound = [&](const Value& value, std::int64_t otherwise) {
    if (value.is_none()) return otherwise;
    std::int64_t at = read(value, 0);
    if (at < 0) {
      at = at < -count ? lowest : at + count;
      return std::max(at, lowest);
    }
    return std::min(at, highest);
  };
  return {bound(begin, stride < 0 ? highest : lowest), bound(end, stride < 0 ? lowest : highest),
          stride};
}

/// Runs over the chosen positions; a step that would leave the 64 bits ends it.
template <class Visit>
void for_each_in(const Range& range, Visit visit) {
  for (std::int64_t i = range.begin; range.step > 0 ? i < range.end : i > range.end;) {
    visit(static_cast<std::size_t>(i));
    if (__builtin_add_overflow(i, range.step, &i)) break;
  }
}

Value method_of(const Value& self, const std::string& name) {
  auto callable = std::make_shared<Callable>();
  callable->kind = Callable::Kind::kMethod;
  callable->name = name;
  callable->self = self;
  return Value::from(std::shared_ptr<const Callable>(std::move(callable)));
}

}  // namespace

Value Interpreter::attribute(const Value& object, const std::string& name) const {
  using ValueKind = Value::Kind;
  switch (object.kind()) {
    case ValueKind::kUndefined:
      fail_undefined(object.as_undefined());
    case ValueKind::kNamespace: {
      const auto& values = object.as_namespace().values;
      const auto found = values.find(name);
      return found == values.end() ? Value::undefined(&name, true) : found->second;
    }
    case ValueKind::kLoop: {
      Value storage;
      if (attribute_of_loop(object.as_loop(), name, storage) != nullptr) return storage;
      if (name == "cycle") {
        auto callable = std::make_shared<Callable>();
        callable->kind = Callable::Kind::kCycle;
        callable->name = name;
        callable->self = object;
        return Value::from(std::shared_ptr<const Callable>(std::move(callable)));
      }
      if (name == "changed") fail("loop.changed is not supported");
      return Value::undefined(&name, true);
    }
    default:
      break;
  }
  // As in Python, a method hides a key of the same name.
  if (has_method(object, name)) return method_of(object, name);
  if (is_forbidden_method(object, name)) return Value::undefined(&name, true);
  if (object.is_dict()) {
    const Value* found = object.as_dict().find(name);
    if (found != nullptr) return *found;
  }
  if (object.is(ValueKind::kCallable) && object.as_callable().kind == Callable::Kind::kMacro &&
      name == "name") {
    return Value::string(object.as_callable().name);
  }
  return Value::undefined(&name, true);
}

Value Interpreter::item(const Value& object, const Value& key) const {
  using ValueKind = Value::Kind;
  if (object.is_undefined()) fail_undefined(object.as_undefined());
  if (object.is_dict()) {
    const Value* found = object.as_dict().find(key);
    if (found != nullptr) return *found;
  } else if (object.is(ValueKind::kList) && object.as_list().form != ListData::Form::kView &&
             key.is_integral()) {
    const Values& items = object.as_list().items;
    std::int64_t at = key.as_int();
    if (at < 0) at += static_cast<std::int64_t>(items.size());
    if (at >= 0 && at < static_cast<std::int64_t>(items.size()))
      return items[static_cast<std::size_t>(at)];
  } else if (object.is_string() && key.is_integral()) {
    const std::u32string code_points = python_text::to_code_points(object.as_string());
    std::int64_t at = key.as_int();
    if (at < 0) at += static_cast<std::int64_t>(code_points.size());
    if (at >= 0 && at < static_cast<std::int64_t>(code_points.size())) {
      return Value::string(
          python_text::from_code_points({&code_points[static_cast<std::size_t>(at)], 1}));
    }
  } else if (object.is(ValueKind::kNamespace) && key.is_string()) {
    const auto& values = object.as_namespace().values;
    const auto found = values.find(key.as_string());
    if (found != values.end()) return found->second;
  }
  if (key.is_string() && has_method(object, key.as_string()))
    return method_of(object, key.as_string());
  return Value::undefined(nullptr, true);
}

Value Interpreter::evaluate(const Expr& expr) {
  if (expr.kind == ExprKind::kConstant) return expr.constant;
  if (expr.kind == ExprKind::kName) return evaluate_name(expr);
  const Depth depth(*this);
  line_ = expr.line;
  switch (expr.kind) {
    case ExprKind::kList:
    case ExprKind::kTuple:
      return evaluate_list(expr);
    case ExprKind::kDict:
      return evaluate_dict(expr);
    case ExprKind::kAttribute:
      return evaluate_attribute(expr);
    case ExprKind::kItem: {
      const Value object = evaluate(*expr.parts[0]);
      const Value key = evaluate(*expr.parts[1]);
      line_ = expr.line;
      if (object.is_string()) work(object.as_string().size());
      return item(object, key);
    }
    case ExprKind::kSlice:
      return evaluate_slice(expr);
    case ExprKind::kCall:
      return evaluate_call(expr);
    case ExprKind::kFilter:
      return evaluate_filter(expr, nullptr);
    case ExprKind::kTest:
      return evaluate_test(expr);
    case ExprKind::kNot:
      return Value::boolean(!evaluate(*expr.parts[0]).truthy());
    case ExprKind::kNegative:
    case ExprKind::kPositive:
      return evaluate_sign(expr);
    case ExprKind::kAnd: {
      Value left = evaluate(*expr.parts[0]);
      return left.truthy() ? evaluate(*expr.parts[1]) : left;
    }
    case ExprKind::kOr: {
      Value left = evaluate(*expr.parts[0]);
      return left.truthy() ? left : evaluate(*expr.parts[1]);
    }
    case ExprKind::kConcat:
      return evaluate_concat(expr);
    case ExprKind::kBinary:
      return evaluate_binary(expr);
    case ExprKind::kCompare:
      return evaluate_compare(expr);
    case ExprKind::kConditional:
      if (evaluate(*expr.parts[0]).truthy()) return evaluate(*expr.parts[1]);
      return expr.parts[2] ? evaluate(*expr.parts[2]) : Value::undefined();
    default:
      return expr.constant;
  }
}

Value Interpreter::evaluate_name(const Expr& expr) {
  work(1);
  const Value* found = scope_->find(expr.symbol);
  if (found != nullptr) return *found;
  if (is_function(expr.name)) {
    auto callable = std::make_shared<Callable>();
    callable->name = expr.name;
    return Value::from(std::shared_ptr<const Callable>(std::move(callable)));
  }
  return Value::undefined(&expr.name);
}

Value Interpreter::evaluate_attribute(const Expr& expr) {
  const Value object = evaluate(*expr.parts[0]);
  line_ = expr.line;
  return attribute(object, expr.name);
}

Value Interpreter::evaluate_slice(const Expr& expr) {
  const Value object = evaluate(*expr.parts[0]);
  const auto bound = [&](int i) {
    return expr.parts[i] ? evaluate(*expr.parts[i]) : Value::none();
  };
  const Value begin = bound(1), end = bound(2), step = bound(3);
  line_ = expr.line;
  if (object.is_undefined()) fail_undefined(object.as_undefined());
  if (object.is_string()) {
    const std::u32string source = python_text::to_code_points(object.as_string());
    work(source.size());
    std::u32string out;
    for_each_in(slice_range(static_cast<std::int64_t>(source.size()), begin, end, step),
                [&](std::size_t i) { out += source[i]; });
    std::string text = python_text::from_code_points(out);
    built(text.size());
    return Value::string(std::move(text), object.is_markup());
  }
  if (object.is(Value::Kind::kList) && object.as_list().form != ListData::Form::kView) {
    const ListData& list = object.as_list();
    Values out;
    for_each_in(slice_range(static_cast<std::int64_t>(list.items.size()), begin, end, step),
                [&](std::size_t i) { out.push_back(list.items[i]); });
    work(out.size());
    return list.form == ListData::Form::kTuple ? Value::tuple(std::move(out))
                                               : Value::list(std::move(out));
  }
  throw TypeError{fmt::format("'{}' object is not subscriptable by a slice", object.type_name())};
}

Value Interpreter::evaluate_list(const Expr& expr) {
  Values items;
  items.reserve(expr.parts.size());
  for (const ExprPtr& part : expr.parts) items.push_back(evaluate(*part));
  line_ = expr.line;
  return expr.kind == ExprKind::kList ? Value::list(std::move(items))
                                      : Value::tuple(std::move(items));
}

Value Interpreter::evaluate_dict(const Expr& expr) {
  std::vector<std::pair<Value, Value>> items;
  for (std::size_t i = 0; i < expr.parts.size(); i += 2) {
    Value key = evaluate(*expr.parts[i]);
    items.emplace_back(std::move(key), evaluate(*expr.parts[i + 1]));
  }
  line_ = expr.line;
  return Value::dict(std::move(items));
}

CallArguments Interpreter::evaluate(const Arguments& arguments) {
  CallArguments out;
  out.positional.reserve(arguments.positional.size());
  for (const ExprPtr& value : arguments.positional) out.positional.push_back(evaluate(*value));
  for (const auto& [name, value] : arguments.named) out.named.emplace_back(name, evaluate(*value));
  if (arguments.more_positional) {
    for (Value& value : items_of(evaluate(*arguments.more_positional)))
      out.positional.push_back(std::move(value));
  }
  if (arguments.more_named) {
    const Value more = evaluate(*arguments.more_named);
    if (!more.is_dict())
      throw TypeError{fmt::format("argument after ** must be a mapping, not {}", more.type_name())};
    for (const auto& [name, value] : more.as_dict().items) {
      if (!name.is_string()) throw TypeError{"keywords must be strings"};
      out.named.emplace_back(name.as_string(), value);
    }
    work(out.named.size());
  }
  return out;
}

Value Interpreter::evaluate_call(const Expr& expr) {
  const Expr& callee = *expr.parts[0];
  if (callee.kind == ExprKind::kAttribute) {
    const Value self = evaluate(*callee.parts[0]);
    if (has_method(self, callee.name)) {
      const CallArguments arguments = evaluate(expr.arguments);
      line_ = expr.line;
      return call_method(*this, self, callee.name, arguments);
    }
    line_ = callee.line;
    if (is_forbidden_method(self, callee.name)) {
      fail("the method '{}' of a {} would change it, which a template may not", callee.name,
           self.type_name());
    }
    const Value function = attribute(self, callee.name);
    if (!function.is_undefined() && !function.is(Value::Kind::kCallable)) {
      fail("'{}' is not a function: it is a {}", callee.name, function.type_name());
    }
    if (function.is_undefined())
      fail("a {} has no method '{}' that is supported", self.type_name(), callee.name);
    const CallArguments arguments = evaluate(expr.arguments);
    line_ = expr.line;
    return call(function, arguments);
  }
  const Value function = evaluate(callee);
  const CallArguments arguments = evaluate(expr.arguments);
  line_ = expr.line;
  return call(function, arguments);
}

Value Interpreter::call(const Value& callee, const CallArguments& arguments) {
  if (callee.is_undefined()) fail_undefined(callee.as_undefined());
  if (!callee.is(Value::Kind::kCallable)) fail("a {} cannot be called", callee.type_name());
  const Callable& callable = callee.as_callable();
  switch (callable.kind) {
    case Callable::Kind::kFunction:
      return call_function(*this, callable.name, arguments);
    case Callable::Kind::kMethod:
      return call_method(*this, callable.self, callable.name, arguments);
    case Callable::Kind::kMacro:
      return call_macro(callable, arguments);
    case Callable::Kind::kCycle:
      if (arguments.positional.empty()) fail("loop.cycle needs values");
      return arguments.positional[callable.self.as_loop().index % arguments.positional.size()];
  }
  return Value();
}

Value Interpreter::evaluate_filter(const Expr& expr, const Value* subject) {
  // A filter or set block gives the subject of the innermost filter.
  const Value value = expr.parts[0] == nullptr ? *subject
                      : subject != nullptr && expr.parts[0]->kind == ExprKind::kFilter
                          ? evaluate_filter(*expr.parts[0], subject)
                          : evaluate(*expr.parts[0]);
  const CallArguments arguments = evaluate(expr.arguments);
  line_ = expr.line;
  return apply_filter(*this, expr.name, value, arguments);
}

Value Interpreter::evaluate_test(const Expr& expr) {
  const Value value = evaluate(*expr.parts[0]);
  const CallArguments arguments = evaluate(expr.arguments);
  line_ = expr.line;
  return Value::boolean(apply_test(*this, expr.name, value, arguments));
}

Value Interpreter::evaluate_concat(const Expr& expr) {
  std::string text;
  for (const ExprPtr& part : expr.parts) {
    text += to_text(evaluate(*part), limits_.max_bytes);
    if (text.size() > limits_.max_bytes) built(text.size());
  }
  line_ = expr.line;
  built(text.size());
  return Value::string(std::move(text));
}

Value Interpreter::evaluate_sign(const Expr& expr) {
  const Value value = evaluate(*expr.parts[0]);
  line_ = expr.line;
  if (value.is_undefined()) fail_undefined(value.as_undefined());
  if (!value.is_number()) fail("bad operand type for a sign: '{}'", value.type_name());
  if (value.is(Value::Kind::kBigInt)) {
    const std::string& digits = value.digits();
    if (expr.kind == ExprKind::kPositive) return value;
    return Value::integer_of(digits.starts_with('-') ? digits.substr(1) : '-' + digits);
  }
  if (expr.kind == ExprKind::kPositive)
    return value.is_integral() ? Value::integer(value.as_int()) : value;
  return value.is_integral() ? subtract(Value::integer(0), value) : Value::real(-value.as_double());
}

Value Interpreter::evaluate_binary(const Expr& expr) {
  const Value left = evaluate(*expr.parts[0]);
  const Value right = evaluate(*expr.parts[1]);
  line_ = expr.line;
  if (left.is_undefined()) fail_undefined(left.as_undefined());
  if (right.is_undefined()) fail_undefined(right.as_undefined());
  Value result;
  switch (expr.op) {
    case Op::kAdd:
      result = add(left, right, limits_.max_bytes);
      break;
    case Op::kSub:
      return subtract(left, right);
    case Op::kMul:
      result = multiply(left, right, limits_.max_bytes);
      break;
    case Op::kDiv:
      return divide(left, right);
    case Op::kFloorDiv:
      return floor_divide(left, right);
    case Op::kMod:
      result =
          left.is_string() ? format_percent(left, right, limits_.max_bytes) : modulo(left, right);
      break;
    case Op::kPow:
      return power(left, right);
    default:
      break;
  }
  if (result.is_string()) built(result.as_string().size());
  if (result.is(Value::Kind::kList)) {
    work(result.as_list().items.size());
    built(result.as_list().items.size() * sizeof(Value));
  }
  return result;
}

Value Interpreter::evaluate_compare(const Expr& expr) {
  Value left = evaluate(*expr.parts[0]);
  for (std::size_t i = 0; i < expr.ops.size(); ++i) {
    Value right = evaluate(*expr.parts[i + 1]);
    line_ = expr.line;
    if (!compare(expr.ops[i], left, right)) return Value::boolean(false);
    left = std::move(right);
  }
  return Value::boolean(true);
}

bool Interpreter::compare(Op op, const Value& a, const Value& b) {
  work(op == Op::kIn || op == Op::kNotIn ? cost_of_finding(a, b) : cost_of_comparing(a, b));
  switch (op) {
    case Op::kEq:
      return equal(a, b);
    case Op::kNe:
      return !equal(a, b);
    case Op::kIn:
      return contains(b, a);
    case Op::kNotIn:
      return !contains(b, a);
    default:
      break;
  }
  if (a.is_undefined()) fail_undefined(a.as_undefined());
  if (b.is_undefined()) fail_undefined(b.as_undefined());
  switch (op) {
    case Op::kLt:
      return less(a, b);
    case Op::kGt:
      return less(b, a);
    case Op::kLe:
      return less(a, b) || equal(a, b);
    default:
      return less(b, a) || equal(a, b);
  }
}

}  // namespace heddle::data::jinja
