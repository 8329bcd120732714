#include "data/jinja/interpreter.h"
#include "data/jinja/python_text.h"

namespace heddle::data::jinja {
namespace {

using Kind = Value::Kind;

/// Arguments of a test; the other value of a comparison is its first argument.
struct TestCall {
  Interpreter& interpreter;
  const std::string& name;
  const Value& subject;
  const CallArguments& arguments;

  const Value& other() const { return ArgumentReader(name, arguments, {"other"}).at(0); }
  /// subject % divisor == rest
  bool leaves(const Value& divisor, std::int64_t rest) const {
    if (subject.is_undefined()) interpreter.fail_undefined(subject.as_undefined());
    return equal(modulo(subject, divisor), Value::integer(rest));
  }
  bool ordered(bool (*holds)(const Value&, const Value&)) const {
    const Value& b = other();
    for (const Value* value : {&subject, &b}) {
      if (value->is_undefined()) interpreter.fail_undefined(value->as_undefined());
    }
    interpreter.work(Interpreter::cost_of_comparing(subject, b));
    return holds(subject, b);
  }
};

bool is_sequence(const Value& value) {
  return value.is_string() || value.is_dict() || value.is_undefined() ||
         (value.is(Kind::kList) && value.as_list().form != ListData::Form::kView);
}

bool is_same(const Value& a, const Value& b) {
  if (a.kind() != b.kind()) return false;
  if (a.is(Kind::kList)) return &a.as_list() == &b.as_list();
  if (a.is_dict()) return &a.as_dict() == &b.as_dict();
  return equal(a, b);
}

struct Test {
  std::string_view name;
  bool (*holds)(const TestCall&);
};

constexpr auto kEqual = [](const TestCall& call) {
  call.interpreter.work(Interpreter::cost_of_comparing(call.subject, call.other()));
  return equal(call.subject, call.other());
};
constexpr auto kNotEqual = [](const TestCall& call) { return !kEqual(call); };
constexpr auto kLess = [](const TestCall& call) { return call.ordered(less); };
constexpr auto kGreater = [](const TestCall& call) {
  return call.ordered([](const Value& a, const Value& b) { return less(b, a); });
};
constexpr auto kLessOrEqual = [](const TestCall& call) {
  return call.ordered([](const Value& a, const Value& b) { return less(a, b) || equal(a, b); });
};
constexpr auto kGreaterOrEqual = [](const TestCall& call) {
  return call.ordered([](const Value& a, const Value& b) { return less(b, a) || equal(a, b); });
};

constexpr Test kTests[] = {
    {"defined", [](const TestCall& call) { return !call.subject.is_undefined(); }},
    {"undefined", [](const TestCall& call) { return call.subject.is_undefined(); }},
    {"none", [](const TestCall& call) { return call.subject.is_none(); }},
    {"boolean", [](const TestCall& call) { return call.subject.is(Kind::kBool); }},
    {"true",
     [](const TestCall& call) { return call.subject.is(Kind::kBool) && call.subject.as_bool(); }},
    {"false",
     [](const TestCall& call) { return call.subject.is(Kind::kBool) && !call.subject.as_bool(); }},
    {"integer",
     [](const TestCall& call) {
       return call.subject.is(Kind::kInt) || call.subject.is(Kind::kBigInt);
     }},
    {"float", [](const TestCall& call) { return call.subject.is(Kind::kFloat); }},
    {"number", [](const TestCall& call) { return call.subject.is_number(); }},
    {"string", [](const TestCall& call) { return call.subject.is_string(); }},
    {"mapping", [](const TestCall& call) { return call.subject.is_dict(); }},
    {"sequence", [](const TestCall& call) { return is_sequence(call.subject); }},
    {"iterable",
     [](const TestCall& call) {
       return is_sequence(call.subject) || call.subject.is(Kind::kList) ||
              call.subject.is(Kind::kIterator) || call.subject.is(Kind::kLoop);
     }},
    {"callable",
     [](const TestCall& call) {
       return call.subject.is(Kind::kCallable) || call.subject.is_undefined();
     }},
    {"sameas", [](const TestCall& call) { return is_same(call.subject, call.other()); }},
    {"in",
     [](const TestCall& call) {
       const Value& container = ArgumentReader(call.name, call.arguments, {"seq"}).at(0);
       call.interpreter.work(Interpreter::cost_of_finding(call.subject, container));
       return contains(container, call.subject);
     }},
    {"odd", [](const TestCall& call) { return call.leaves(Value::integer(2), 1); }},
    {"even", [](const TestCall& call) { return call.leaves(Value::integer(2), 0); }},
    {"divisibleby",
     [](const TestCall& call) {
       return call.leaves(ArgumentReader(call.name, call.arguments, {"num"}).at(0), 0);
     }},
    {"lower",
     [](const TestCall& call) {
       call.interpreter.work(Interpreter::cost(call.subject));
       return python_text::is_lower(to_text(call.subject, call.interpreter.max_bytes()));
     }},
    {"upper",
     [](const TestCall& call) {
       call.interpreter.work(Interpreter::cost(call.subject));
       return python_text::is_upper(to_text(call.subject, call.interpreter.max_bytes()));
     }},
    {"filter",
     [](const TestCall& call) {
       return is_filter(to_text(call.subject, call.interpreter.max_bytes()));
     }},
    {"test",
     [](const TestCall& call) {
       return is_test(to_text(call.subject, call.interpreter.max_bytes()));
     }},
    {"eq", kEqual},
    {"equalto", kEqual},
    {"==", kEqual},
    {"ne", kNotEqual},
    {"!=", kNotEqual},
    {"lt", kLess},
    {"lessthan", kLess},
    {"<", kLess},
    {"le", kLessOrEqual},
    {"<=", kLessOrEqual},
    {"gt", kGreater},
    {"greaterthan", kGreater},
    {">", kGreater},
    {"ge", kGreaterOrEqual},
    {">=", kGreaterOrEqual},
};

const Test* find_test(std::string_view name) {
  for (const Test& test : kTests) {
    if (test.name == name) return &test;
  }
  return nullptr;
}

}  // namespace

bool is_test(std::string_view name) { return find_test(name) != nullptr; }

bool apply_test(Interpreter& interpreter, const std::string& name, const Value& subject,
                const CallArguments& arguments) {
  // Jinja too asks for the test where it is used, not where the template is read.
  const Test* test = find_test(name);
  if (test == nullptr) throw TypeError{fmt::format("test '{}' is not supported", name)};
  interpreter.work(1);
  return test->holds({interpreter, name, subject, arguments});
}

}  // namespace heddle::data::jinja
