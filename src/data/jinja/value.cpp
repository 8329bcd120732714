#include "data/jinja/value.h"

#include <algorithm>
#include <charconv>
#include <cmath>
#include <cstdlib>

#include "base/errors.h"
#include "data/jinja/callable.h"
#include "data/json/json_text.h"

namespace heddle::data::jinja {
namespace {

// Below this many keys a scan is as fast as a hash table.
constexpr std::size_t kIndexedFrom = 16;

int checked_depth(int depth) {
  if (depth > Value::kDeepest) {
    throw TypeError{fmt::format("a value is nested deeper than {} levels", Value::kDeepest)};
  }
  return depth;
}

void include(Value::Extent& whole, const Value& part) {
  const Value::Extent extent = part.extent();
  whole.depth = std::max(whole.depth, checked_depth(extent.depth + 1));
  whole.weight += extent.weight;
  if (whole.weight > Value::kHeaviest)
    throw TypeError{fmt::format("a value stands for more than {} values", Value::kHeaviest)};
}

Value::Extent extent_of(const Values& items) {
  Value::Extent extent{1, 1};
  for (const Value& item : items) include(extent, item);
  return extent;
}

Value from_json_at(const nlohmann::ordered_json& json, int level) {
  checked_depth(level);
  switch (json.type()) {
    case nlohmann::json::value_t::boolean:
      return Value::boolean(json.get<bool>());
    case nlohmann::json::value_t::number_integer:
      return Value::integer(json.get<std::int64_t>());
    case nlohmann::json::value_t::number_unsigned:
      return Value::integer_of(std::to_string(json.get<std::uint64_t>()));
    case nlohmann::json::value_t::binary:
      return Value::integer_of(json_text::big_integer(json).value());
    case nlohmann::json::value_t::number_float:
      return Value::real(json.get<double>());
    case nlohmann::json::value_t::string:
      return Value::string(json.get<std::string>());
    case nlohmann::json::value_t::array: {
      Values items;
      items.reserve(json.size());
      for (const auto& item : json) items.push_back(from_json_at(item, level + 1));
      return Value::list(std::move(items));
    }
    case nlohmann::json::value_t::object: {
      std::vector<std::pair<Value, Value>> items;
      items.reserve(json.size());
      for (const auto& [key, value] : json.items()) {
        items.emplace_back(Value::string(key), from_json_at(value, level + 1));
      }
      return Value::dict(std::move(items));
    }
    default:
      return Value::none();
  }
}

}  // namespace

Value Value::undefined(const std::string* name, bool is_attribute) {
  Value value;
  value.data_ = Undefined{name, is_attribute};
  return value;
}
Value Value::none() {
  Value value;
  value.data_ = None{};
  return value;
}
Value Value::boolean(bool b) {
  Value value;
  value.data_ = b;
  return value;
}
Value Value::integer(std::int64_t i) {
  Value value;
  value.data_ = i;
  return value;
}
Value Value::integer_of(std::string digits) {
  std::int64_t small = 0;
  const auto read = std::from_chars(digits.data(), digits.data() + digits.size(), small);
  if (read.ec == std::errc()) return integer(small);
  Value value;
  value.data_ = std::make_shared<const std::string>(std::move(digits));
  return value;
}
Value Value::real(double d) {
  Value value;
  value.data_ = d;
  return value;
}
Value Value::string(std::string s, bool is_markup) {
  Value value;
  value.data_ = std::make_shared<const StringData>(StringData{std::move(s), is_markup});
  return value;
}

namespace {

std::shared_ptr<const ListData> make_list(Values items, ListData::Form form) {
  auto data = std::make_shared<ListData>();
  data->form = form;
  data->extent = extent_of(items);
  data->items = std::move(items);
  return data;
}

}  // namespace

Value Value::list(Values items) {
  Value value;
  value.data_ = make_list(std::move(items), ListData::Form::kList);
  return value;
}
Value Value::tuple(Values items) {
  Value value;
  value.data_ = make_list(std::move(items), ListData::Form::kTuple);
  return value;
}
Value Value::view(Values items) {
  Value value;
  value.data_ = make_list(std::move(items), ListData::Form::kView);
  return value;
}
Value Value::iterator(Values items) {
  auto data = std::make_shared<IteratorData>();
  data->extent = extent_of(items);
  data->items = std::move(items);
  Value value;
  value.data_ = std::move(data);
  return value;
}

Value Value::dict(std::vector<std::pair<Value, Value>> items) {
  auto data = std::make_shared<DictData>();
  data->items.reserve(items.size());
  const bool indexed = items.size() > kIndexedFrom;
  data->extent = {1, 1};
  for (auto& [key, item] : items) {
    include(data->extent, key);
    include(data->extent, item);
    const Value* known = data->find(key);
    if (known != nullptr) {
      const_cast<Value&>(*known) = std::move(item);  // the dictionary is still ours alone
      continue;
    }
    if (key.kind() == Kind::kDict || key.kind() == Kind::kUndefined ||
        (key.kind() == Kind::kList && key.as_list().form != ListData::Form::kTuple)) {
      throw TypeError{fmt::format("unhashable type: '{}'", key.type_name())};
    }
    data->items.emplace_back(std::move(key), std::move(item));
    const Value& stored = data->items.back().first;
    if (indexed && stored.is_string())
      data->index_.emplace(stored.as_string(), data->items.size() - 1);
  }
  Value value;
  value.data_ = std::move(data);
  return value;
}

Value Value::from(Namespace* space) {
  Value value;
  value.data_ = space;
  return value;
}
Value Value::from(std::shared_ptr<LoopData> loop) {
  Value value;
  value.data_ = std::move(loop);
  return value;
}
Value Value::from(std::shared_ptr<const Callable> callable) {
  Value value;
  value.data_ = std::move(callable);
  return value;
}
Value Value::from_json(const nlohmann::ordered_json& json) { return from_json_at(json, 1); }

std::int64_t Value::as_int() const {
  if (is(Kind::kBigInt)) {
    throw TypeError{
        fmt::format("the integer {} needs more than 64 bits to be calculated with", digits())};
  }
  return is(Kind::kBool) ? as_bool() : std::get<std::int64_t>(data_);
}
double Value::as_double() const {
  if (is(Kind::kBigInt)) return std::strtod(digits().c_str(), nullptr);
  return is(Kind::kFloat) ? std::get<double>(data_) : static_cast<double>(as_int());
}

bool Value::truthy() const {
  switch (kind()) {
    case Kind::kUndefined:
    case Kind::kNone:
      return false;
    case Kind::kBool:
      return as_bool();
    case Kind::kInt:
      return as_int() != 0;
    case Kind::kFloat:
      return as_double() != 0;
    case Kind::kString:
      return !as_string().empty();
    case Kind::kList:
      return !as_list().items.empty();
    case Kind::kDict:
      return !as_dict().items.empty();
    case Kind::kLoop:
      return as_loop().items.size() != 0;
    default:
      return true;
  }
}

Value::Extent Value::extent() const {
  switch (kind()) {
    case Kind::kString:
      return {0, 1 + as_string().size() / 16};
    case Kind::kList:
      return as_list().extent;
    case Kind::kDict:
      return as_dict().extent;
    case Kind::kIterator:
      return as_iterator().extent;
    case Kind::kCallable:
      return as_callable().extent();
    case Kind::kLoop:
      return as_loop().extent;
    default:
      return {};
  }
}

const char* Value::type_name() const {
  switch (kind()) {
    case Kind::kUndefined:
      return "Undefined";
    case Kind::kNone:
      return "NoneType";
    case Kind::kBool:
      return "bool";
    case Kind::kInt:
    case Kind::kBigInt:
      return "int";
    case Kind::kFloat:
      return "float";
    case Kind::kString:
      return "str";
    case Kind::kList:
      return as_list().form == ListData::Form::kList    ? "list"
             : as_list().form == ListData::Form::kTuple ? "tuple"
                                                        : "dict view";
    case Kind::kDict:
      return "dict";
    case Kind::kIterator:
      return "generator";
    case Kind::kNamespace:
      return "Namespace";
    case Kind::kLoop:
      return "LoopContext";
    case Kind::kCallable:
      return "function";
  }
  return "object";
}

const Value* DictData::find(std::string_view key) const {
  if (!index_.empty()) {
    const auto found = index_.find(key);
    return found == index_.end() ? nullptr : &items[found->second].second;
  }
  for (const auto& [name, value] : items) {
    if (name.is_string() && name.as_string() == key) return &value;
  }
  return nullptr;
}

const Value* DictData::find(const Value& key) const {
  if (key.is_string()) return find(std::string_view(key.as_string()));
  for (const auto& [name, value] : items) {
    if (equal(name, key)) return &value;
  }
  return nullptr;
}

namespace {

/// < 0, 0 or > 0 as a is below, equal to or above b; both are integers of any size.
int compare_integers(const Value& a, const Value& b) {
  const auto digits = [](const Value& value) {
    return value.is(Value::Kind::kBigInt) ? value.digits() : std::to_string(value.as_int());
  };
  if (!a.is(Value::Kind::kBigInt) && !b.is(Value::Kind::kBigInt)) {
    return (a.as_int() > b.as_int()) - (a.as_int() < b.as_int());
  }
  const std::string x = digits(a), y = digits(b);
  const bool x_negative = x.starts_with('-'), y_negative = y.starts_with('-');
  if (x_negative != y_negative) return x_negative ? -1 : 1;
  const int above = x.size() != y.size() ? (x.size() < y.size() ? -1 : 1) : x.compare(y);
  return x_negative ? -above : above;
}

}  // namespace

bool equal(const Value& a, const Value& b) {
  using Kind = Value::Kind;
  if (a.is_number() && b.is_number()) {
    return a.is_integral() && b.is_integral() ? compare_integers(a, b) == 0
                                              : a.as_double() == b.as_double();
  }
  if (a.kind() != b.kind()) return false;
  switch (a.kind()) {
    case Kind::kUndefined:
    case Kind::kNone:
      return true;
    case Kind::kString:
      return a.as_string() == b.as_string();
    case Kind::kList: {
      const ListData &x = a.as_list(), &y = b.as_list();
      if (&x == &y) return true;
      return x.form == y.form &&
             std::equal(x.items.begin(), x.items.end(), y.items.begin(), y.items.end(), equal);
    }
    case Kind::kDict: {
      const DictData &x = a.as_dict(), &y = b.as_dict();
      if (&x == &y) return true;
      if (x.items.size() != y.items.size()) return false;
      for (const auto& [key, value] : x.items) {
        const Value* other = y.find(key);
        if (other == nullptr || !equal(value, *other)) return false;
      }
      return true;
    }
    case Kind::kIterator:
      return &a.as_iterator() == &b.as_iterator();
    case Kind::kNamespace:
      return &a.as_namespace() == &b.as_namespace();
    case Kind::kLoop:
      return &a.as_loop() == &b.as_loop();
    case Kind::kCallable:
      return &a.as_callable() == &b.as_callable();
    default:
      return false;
  }
}

bool less(const Value& a, const Value& b) {
  if (a.is_number() && b.is_number()) {
    return a.is_integral() && b.is_integral() ? compare_integers(a, b) < 0
                                              : a.as_double() < b.as_double();
  }
  if (a.is_string() && b.is_string())
    return a.as_string() < b.as_string();  // UTF-8 keeps the order of code points
  if (a.is(Value::Kind::kList) && b.is(Value::Kind::kList) &&
      a.as_list().form == b.as_list().form && a.as_list().form != ListData::Form::kView) {
    const Values &x = a.as_list().items, &y = b.as_list().items;
    for (std::size_t i = 0; i < x.size() && i < y.size(); ++i) {
      if (!equal(x[i], y[i])) return less(x[i], y[i]);
    }
    return x.size() < y.size();
  }
  throw TypeError{fmt::format("'<' not supported between instances of '{}' and '{}'", a.type_name(),
                              b.type_name())};
}

}  // namespace heddle::data::jinja
