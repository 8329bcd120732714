#include <chrono>
#include <ctime>

#include "data/jinja/interpreter.h"

namespace heddle::data::jinja {
namespace {

/// The local time in strftime's format; %f is microseconds, as in Python.
std::string local_time(std::string format) {
  using Clock = std::chrono::system_clock;
  const auto now = Clock::now();
  const std::time_t seconds = Clock::to_time_t(now);
  const auto micros =
      std::chrono::duration_cast<std::chrono::microseconds>(now.time_since_epoch()).count() %
      1'000'000;
  std::tm parts{};
  localtime_r(&seconds, &parts);
  for (std::size_t at = 0;
       (at = format.find('%', at)) != std::string::npos && at + 1 < format.size(); at += 2) {
    if (format[at + 1] == 'f') format.replace(at, 2, fmt::format("{:06}", micros));
  }
  constexpr std::size_t kLongest = 4096;
  if (format.size() > kLongest) throw TypeError{"strftime_now() format is too long"};
  std::string out(16 * kLongest, '\0');
  format += ' ';  // so that an empty result is not taken for a failure
  out.resize(std::strftime(out.data(), out.size(), format.c_str(), &parts));
  if (out.empty()) throw TypeError{"strftime_now() result is too long"};
  out.pop_back();
  return out;
}

Value make_range(Interpreter& interpreter, const CallArguments& arguments) {
  constexpr std::int64_t kLongest = 100'000;  // as the sandbox of transformers allows
  if (!arguments.named.empty() || arguments.positional.empty() || arguments.positional.size() > 3) {
    throw TypeError{"range() takes 1 to 3 arguments"};
  }
  for (const Value& value : arguments.positional) {
    if (value.is_undefined()) interpreter.fail_undefined(value.as_undefined());
    if (!value.is_integral())
      throw TypeError{
          fmt::format("'{}' object cannot be interpreted as an integer", value.type_name())};
  }
  const bool one = arguments.positional.size() == 1;
  const std::int64_t begin = one ? 0 : arguments.positional[0].as_int();
  const std::int64_t end =
      one ? arguments.positional[0].as_int() : arguments.positional[1].as_int();
  const std::int64_t step = arguments.positional.size() == 3 ? arguments.positional[2].as_int() : 1;
  if (step == 0) throw TypeError{"range() arg 3 must not be zero"};
  Values items;
  for (std::int64_t i = begin; step > 0 ? i < end : i > end;) {
    if (static_cast<std::int64_t>(items.size()) >= kLongest)
      throw TypeError{fmt::format("range too big: at most {} items", kLongest)};
    items.push_back(Value::integer(i));
    if (__builtin_add_overflow(i, step, &i)) break;
  }
  interpreter.work(items.size());
  return Value::list(std::move(items));
}

/// Cost of a key of a new dictionary, in steps: it is hashed and its memory is new.
constexpr std::uint64_t kCopiedKey = 8;

/// The items of dict(...) and namespace(...): a mapping or pairs, and keywords.
std::vector<std::pair<Value, Value>> pairs_of(Interpreter& interpreter, const std::string& name,
                                              const CallArguments& arguments) {
  std::vector<std::pair<Value, Value>> items;
  if (arguments.positional.size() > 1)
    throw TypeError{fmt::format("{}() takes at most one positional argument", name)};
  if (!arguments.positional.empty()) {
    const Value& from = arguments.positional[0];
    if (from.is_dict()) {
      interpreter.work(from.as_dict().items.size() * kCopiedKey);
      items = from.as_dict().items;
    } else {
      for (const Value& pair : interpreter.items_of(from)) {
        interpreter.work(kCopiedKey);
        Values parts = interpreter.items_of(pair);
        if (parts.size() != 2)
          throw TypeError{fmt::format("{}() needs pairs of key and value", name)};
        items.emplace_back(std::move(parts[0]), std::move(parts[1]));
      }
    }
  }
  interpreter.work(arguments.named.size() * kCopiedKey);
  for (const auto& [key, value] : arguments.named) items.emplace_back(Value::string(key), value);
  return items;
}

}  // namespace

bool is_function(std::string_view name) {
  for (const std::string_view known : {"range", "dict", "namespace", "raise_exception",
                                       "strftime_now", "lipsum", "cycler", "joiner"}) {
    if (name == known) return true;
  }
  return false;
}

Value call_function(Interpreter& interpreter, const std::string& name,
                    const CallArguments& arguments) {
  if (name == "range") return make_range(interpreter, arguments);
  if (name == "dict") return Value::dict(pairs_of(interpreter, name, arguments));
  if (name == "namespace") {
    Namespace* space = interpreter.make_namespace();
    for (auto& [key, value] : pairs_of(interpreter, name, arguments)) {
      if (!key.is_string()) throw TypeError{"a namespace needs strings as names"};
      if (key.as_string().starts_with('_')) {
        throw TypeError{fmt::format("a namespace cannot have an attribute '{}'", key.as_string())};
      }
      space->values[key.as_string()] = std::move(value);
    }
    return Value::from(space);
  }
  if (name == "raise_exception") {
    const ArgumentReader reader(name, arguments, {"message"});
    throw TypeError{
        fmt::format("raise_exception: {}", to_text(reader.at(0), interpreter.max_bytes()))};
  }
  if (name == "strftime_now") {
    return Value::string(
        local_time(ArgumentReader(name, arguments, {"format"}).string(0).value_or("")));
  }
  throw TypeError{fmt::format("the function '{}' is not supported", name)};
}

}  // namespace heddle::data::jinja
