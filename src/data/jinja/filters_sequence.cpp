#include <algorithm>
#include <charconv>

#include "data/jinja/filter.h"
#include "data/jinja/python_text.h"

namespace heddle::data::jinja {
namespace {

using Kind = Value::Kind;

/// Follows "a.b.0" from an item; keys come before methods, as in a subscript.
Value dotted(Interpreter& interpreter, Value item, const Value& path, const Value* otherwise) {
  if (path.is_integral()) {
    item = interpreter.item(item, path);
  } else {
    for (const std::string& part :
         python_text::split(to_text(path, interpreter.max_bytes()), ".", -1, false)) {
      interpreter.work(1);
      std::int64_t index = 0;
      const auto result = std::from_chars(part.data(), part.data() + part.size(), index);
      const bool is_index = !part.empty() && part[0] != '-' && result.ec == std::errc() &&
                            result.ptr == part.data() + part.size();
      item = interpreter.item(item, is_index ? Value::integer(index) : Value::string(part));
      if (item.is_undefined() && otherwise != nullptr) item = *otherwise;
    }
  }
  return item;
}

/// Key for sorting: an attribute or several, without regard to case unless asked.
Value sort_key(Interpreter& interpreter, const Value& item, const Value* attribute,
               bool case_sensitive) {
  const auto fold = [&](Value value) {
    return !case_sensitive && value.is_string()
               ? Value::string(python_text::lower(value.as_string()))
               : value;
  };
  if (attribute == nullptr || attribute->is_none()) return fold(item);
  if (!attribute->is_string() || attribute->as_string().find(',') == std::string::npos) {
    return fold(dotted(interpreter, item, *attribute, nullptr));
  }
  Values keys;
  for (std::string& part : python_text::split(attribute->as_string(), ",", -1, false)) {
    keys.push_back(fold(dotted(interpreter, item, Value::string(std::move(part)), nullptr)));
  }
  return Value::list(std::move(keys));
}

Values sorted(Interpreter& interpreter, Values items, const Value* attribute, bool case_sensitive,
              bool reverse) {
  std::vector<std::pair<Value, Value>> keyed;
  keyed.reserve(items.size());
  std::uint64_t cost = 1;
  for (Value& item : items) {
    keyed.emplace_back(sort_key(interpreter, item, attribute, case_sensitive), item);
    cost += 8 + Interpreter::cost(keyed.back().first) * 8;
  }
  interpreter.work(cost);
  std::stable_sort(keyed.begin(), keyed.end(), [&](const auto& a, const auto& b) {
    return reverse ? less(b.first, a.first) : less(a.first, b.first);
  });
  for (std::size_t i = 0; i < items.size(); ++i) items[i] = std::move(keyed[i].second);
  return items;
}

Value filter_attr(const FilterCall& call) {
  const auto arguments = call.read({"name"});
  const std::string name = to_text(arguments.at(0), call.interpreter.max_bytes());
  // Attributes only, never keys.
  if (call.subject.is_dict() && !has_method(call.subject, name))
    return Value::undefined(nullptr, true);
  const Value found = call.interpreter.attribute(call.subject, name);
  return found.is_undefined() ? Value::undefined(nullptr, true) : found;
}

Value filter_batch(const FilterCall& call) {
  const auto arguments = call.read({"linecount", "fill_with"});
  const std::int64_t size = arguments.integer(0, 0);
  if (size <= 0) throw TypeError{"batch() needs a positive linecount"};
  Values batches, batch;
  const Values items = call.items();
  for (const Value& item : items) {
    batch.push_back(item);
    if (static_cast<std::int64_t>(batch.size()) == size)
      batches.push_back(Value::list(std::exchange(batch, {})));
  }
  if (!batch.empty()) {
    if (arguments.has(1) && !arguments.at(1).is_none()) {
      call.interpreter.work(static_cast<std::uint64_t>(size));
      batch.resize(static_cast<std::size_t>(size), arguments.at(1));
    }
    batches.push_back(Value::list(std::move(batch)));
  }
  return Value::iterator(std::move(batches));
}

Value filter_default(const FilterCall& call) {
  const auto arguments = call.read({"default_value", "boolean"});
  const bool replace =
      call.subject.is_undefined() || (arguments.boolean(1, false) && !call.subject.truthy());
  if (!replace) return call.subject;
  return arguments.has(0) ? arguments.at(0) : Value::string("");
}

Value filter_dictsort(const FilterCall& call) {
  const auto arguments = call.read({"case_sensitive", "by", "reverse"});
  call.need_defined();
  if (!call.subject.is_dict())
    throw TypeError{fmt::format("dictsort() needs a mapping, not {}", call.subject.type_name())};
  const std::string by = arguments.string(1).value_or("key");
  if (by != "key" && by != "value")
    throw TypeError{"You can only sort by either \"key\" or \"value\""};
  Values pairs;
  call.interpreter.work(call.subject.as_dict().items.size());
  for (const auto& [key, value] : call.subject.as_dict().items)
    pairs.push_back(Value::tuple({key, value}));
  const Value index = Value::integer(by == "key" ? 0 : 1);
  return Value::list(sorted(call.interpreter, std::move(pairs), &index, arguments.boolean(0, false),
                            arguments.boolean(2, false)));
}

Value filter_first(const FilterCall& call) {
  call.read({});
  if (call.subject.is(Kind::kIterator)) {
    IteratorData& data = call.subject.as_iterator();
    return data.next < data.items.size() ? data.items[data.next++] : Value::undefined();
  }
  if (call.subject.is(Kind::kList)) {
    const Values& list = call.subject.as_list().items;
    return list.empty() ? Value::undefined() : list.front();
  }
  const Values items = call.items();
  return items.empty() ? Value::undefined() : items.front();
}

Value filter_items(const FilterCall& call) {
  call.read({});
  Values pairs;
  if (!call.subject.is_undefined()) {
    if (!call.subject.is_dict()) throw TypeError{"Can only get item pairs from a mapping."};
    call.interpreter.work(call.subject.as_dict().items.size());
    for (const auto& [key, value] : call.subject.as_dict().items)
      pairs.push_back(Value::tuple({key, value}));
  }
  return Value::iterator(std::move(pairs));
}

Value filter_join(const FilterCall& call) {
  const auto arguments = call.read({"d", "attribute"});
  const std::string separator =
      arguments.has(0) ? to_text(arguments.at(0), call.interpreter.max_bytes()) : "";
  TextSink out(call.interpreter.max_bytes());
  bool first = true;
  for (Value& item : call.items()) {
    if (!first) out.add(separator);
    first = false;
    if (arguments.has(1) && !arguments.at(1).is_none())
      item = dotted(call.interpreter, item, arguments.at(1), nullptr);
    call.interpreter.work(Interpreter::cost(item));
    out.add(to_text(item, call.interpreter.max_bytes()));
  }
  return Value::string(out.take());
}

Value filter_last(const FilterCall& call) {
  call.read({});
  if (call.subject.is(Kind::kIterator)) throw TypeError{"'generator' object is not reversible"};
  if (call.subject.is(Kind::kList)) {
    const Values& list = call.subject.as_list().items;
    return list.empty() ? Value::undefined() : list.back();
  }
  const Values items = call.items();
  return items.empty() ? Value::undefined() : items.back();
}

Value filter_length(const FilterCall& call) {
  call.read({});
  if (call.subject.is_string()) call.interpreter.work(Interpreter::cost(call.subject));
  return Value::integer(length(call.subject));
}

Value filter_list(const FilterCall& call) {
  call.read({});
  return Value::list(call.items());
}

Value filter_map(const FilterCall& call) {
  Values out;
  if (!call.subject.truthy())
    return Value::iterator({});  // Jinja asks before it iterates: None is empty here
  const CallArguments& given = call.arguments;
  if (given.positional.empty()) {
    const auto arguments = call.read({"attribute", "default"});
    const Value& attribute = arguments.at(0);
    const Value* otherwise = arguments.has(1) ? &arguments.at(1) : nullptr;
    for (const Value& item : call.items()) {
      out.push_back(dotted(call.interpreter, item, attribute, otherwise));
    }
  } else {
    const std::string filter = to_text(given.positional[0], call.interpreter.max_bytes());
    CallArguments rest{{given.positional.begin() + 1, given.positional.end()}, given.named};
    for (const Value& item : call.items()) {
      out.push_back(apply_filter(call.interpreter, filter, item, rest));
    }
  }
  return Value::iterator(std::move(out));
}

Value extreme(const FilterCall& call, bool largest) {
  const auto arguments = call.read({"case_sensitive", "attribute"});
  const Value* attribute = arguments.has(1) ? &arguments.at(1) : nullptr;
  Value best = Value::undefined(), best_key;
  bool first = true;
  for (const Value& item : call.items()) {
    Value key = sort_key(call.interpreter, item, attribute, arguments.boolean(0, false));
    call.interpreter.work(Interpreter::cost(key));
    if (first || (largest ? less(best_key, key) : less(key, best_key))) {
      best = item;
      best_key = std::move(key);
    }
    first = false;
  }
  return best;
}

Value filter_max(const FilterCall& call) { return extreme(call, true); }

Value filter_min(const FilterCall& call) { return extreme(call, false); }

/// select, reject, selectattr, rejectattr.
Value choose(const FilterCall& call, bool by_attribute, bool wanted) {
  if (!call.subject.truthy()) return Value::iterator({});
  const CallArguments& given = call.arguments;
  std::size_t used = 0;
  Value attribute;
  if (by_attribute) {
    if (given.positional.empty())
      throw TypeError{fmt::format("Missing parameter for attribute name of {}()", call.name)};
    attribute = given.positional[used++];
  }
  std::string test;
  if (used < given.positional.size())
    test = to_text(given.positional[used++], call.interpreter.max_bytes());
  const CallArguments rest{
      {given.positional.begin() + static_cast<std::ptrdiff_t>(used), given.positional.end()},
      given.named};
  Values out;
  for (const Value& item : call.items()) {
    const Value value = by_attribute ? dotted(call.interpreter, item, attribute, nullptr) : item;
    const bool holds =
        test.empty() ? value.truthy() : apply_test(call.interpreter, test, value, rest);
    if (holds == wanted) out.push_back(item);
  }
  return Value::iterator(std::move(out));
}

Value filter_select(const FilterCall& call) { return choose(call, false, true); }

Value filter_reject(const FilterCall& call) { return choose(call, false, false); }

Value filter_selectattr(const FilterCall& call) { return choose(call, true, true); }

Value filter_rejectattr(const FilterCall& call) { return choose(call, true, false); }

Value filter_reverse(const FilterCall& call) {
  call.read({});
  if (call.subject.is_string()) {
    call.interpreter.work(Interpreter::cost(call.subject));
    std::u32string code_points = python_text::to_code_points(call.subject.as_string());
    std::reverse(code_points.begin(), code_points.end());
    return Value::string(python_text::from_code_points(code_points));
  }
  Values items = call.items();
  std::reverse(items.begin(), items.end());
  return call.subject.is(Kind::kIterator) ? Value::list(std::move(items))
                                          : Value::iterator(std::move(items));
}

Value filter_sort(const FilterCall& call) {
  const auto arguments = call.read({"reverse", "case_sensitive", "attribute"});
  const Value* attribute = arguments.has(2) ? &arguments.at(2) : nullptr;
  return Value::list(sorted(call.interpreter, call.items(), attribute, arguments.boolean(1, false),
                            arguments.boolean(0, false)));
}

Value filter_sum(const FilterCall& call) {
  const auto arguments = call.read({"attribute", "start"});
  Value total = arguments.has(1) ? arguments.at(1) : Value::integer(0);
  for (Value& item : call.items()) {
    if (arguments.has(0) && !arguments.at(0).is_none())
      item = dotted(call.interpreter, item, arguments.at(0), nullptr);
    if (item.is_string() || total.is_string()) throw TypeError{"sum() can't sum strings"};
    total = add(total, item, call.interpreter.max_bytes());
    call.interpreter.work(Interpreter::cost(total));
  }
  return total;
}

Value filter_unique(const FilterCall& call) {
  const auto arguments = call.read({"case_sensitive", "attribute"});
  const Value* attribute = arguments.has(1) ? &arguments.at(1) : nullptr;
  Values out, seen;
  for (const Value& item : call.items()) {
    Value key = sort_key(call.interpreter, item, attribute, arguments.boolean(0, false));
    call.interpreter.work(1 + seen.size() * Interpreter::cost(key));
    if (std::any_of(seen.begin(), seen.end(),
                    [&](const Value& other) { return equal(other, key); }))
      continue;
    seen.push_back(std::move(key));
    out.push_back(item);
  }
  return Value::iterator(std::move(out));
}

constexpr Filter kSequenceFilters[] = {
    {"attr", filter_attr},
    {"batch", filter_batch},
    {"count", filter_length},
    {"d", filter_default},
    {"default", filter_default},
    {"dictsort", filter_dictsort},
    {"first", filter_first},
    {"items", filter_items},
    {"join", filter_join},
    {"last", filter_last},
    {"length", filter_length},
    {"list", filter_list},
    {"map", filter_map},
    {"max", filter_max},
    {"min", filter_min},
    {"reject", filter_reject},
    {"rejectattr", filter_rejectattr},
    {"reverse", filter_reverse},
    {"select", filter_select},
    {"selectattr", filter_selectattr},
    {"sort", filter_sort},
    {"sum", filter_sum},
    {"unique", filter_unique},
};

}  // namespace

std::span<const Filter> sequence_filters() { return kSequenceFilters; }

}  // namespace heddle::data::jinja
