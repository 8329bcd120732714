#pragma once

#include <cstdint>
#include <memory>
#include <string>
#include <string_view>
#include <unordered_map>
#include <utility>
#include <variant>
#include <vector>

#include <nlohmann/json.hpp>

namespace heddle::data::jinja {

class Value;
struct StringData;
struct ListData;
struct DictData;
struct IteratorData;
struct LoopData;
struct Callable;
struct Namespace;

using Values = std::vector<Value>;

/// Why a value is undefined: the name that was looked for (owned by the template), and whether as
/// an attribute.
struct Undefined {
  const std::string* name = nullptr;
  bool is_attribute = false;
};

/// A Python value as a template sees it. Copies are cheap; lists, dictionaries and strings are
/// shared and never change.
class Value {
 public:
  enum class Kind {
    kUndefined,
    kNone,
    kBool,
    kInt,
    kFloat,
    kString,
    kList,
    kDict,
    kIterator,
    kNamespace,
    kLoop,
    kCallable,
    kBigInt,
  };

  Value() = default;
  static Value undefined(const std::string* name = nullptr, bool is_attribute = false);
  static Value none();
  static Value boolean(bool value);
  static Value integer(std::int64_t value);
  /// An integer by its decimal digits, without leading zeros ("-12"): of 64 bits or beyond them.
  static Value integer_of(std::string digits);
  static Value real(double value);
  /// `is_markup`: marked by the filter `safe`, so that `+`, `%` and methods escape what is joined
  /// to it, as in Python.
  static Value string(std::string value, bool is_markup = false);
  static Value list(Values items);
  static Value tuple(Values items);
  /// A generator: true whatever it holds, without a length, and empty once it has been run through.
  static Value iterator(Values items);
  /// Result of dict.items(), keys(), values(): has a length, cannot be indexed.
  static Value view(Values items);
  /// The last of equal keys counts.
  static Value dict(std::vector<std::pair<Value, Value>> items);
  static Value from(Namespace* space);
  static Value from(std::shared_ptr<LoopData> loop);
  static Value from(std::shared_ptr<const Callable> callable);
  /// Throws TypeError for nesting beyond kDeepest.
  static Value from_json(const nlohmann::ordered_json& json);

  Kind kind() const { return static_cast<Kind>(data_.index()); }
  bool is(Kind kind) const { return this->kind() == kind; }
  bool is_undefined() const { return is(Kind::kUndefined); }
  bool is_none() const { return is(Kind::kNone); }
  bool is_string() const { return is(Kind::kString); }
  bool is_dict() const { return is(Kind::kDict); }
  /// Integer or boolean, which Python counts as one.
  bool is_integral() const { return is(Kind::kInt) || is(Kind::kBool) || is(Kind::kBigInt); }
  bool is_number() const { return is_integral() || is(Kind::kFloat); }

  const Undefined& as_undefined() const { return std::get<Undefined>(data_); }
  bool as_bool() const { return std::get<bool>(data_); }
  /// Throws TypeError for an integer beyond 64 bits: it can be compared and written, but not
  /// calculated with.
  std::int64_t as_int() const;
  double as_double() const;
  const std::string& as_string() const;
  bool is_markup() const;
  const ListData& as_list() const { return *std::get<std::shared_ptr<const ListData>>(data_); }
  const DictData& as_dict() const { return *std::get<std::shared_ptr<const DictData>>(data_); }
  const std::string& digits() const { return *std::get<std::shared_ptr<const std::string>>(data_); }
  IteratorData& as_iterator() const { return *std::get<std::shared_ptr<IteratorData>>(data_); }
  Namespace& as_namespace() const { return *std::get<Namespace*>(data_); }
  LoopData& as_loop() const { return *std::get<std::shared_ptr<LoopData>>(data_); }
  const Callable& as_callable() const { return *std::get<std::shared_ptr<const Callable>>(data_); }

  bool truthy() const;
  /// Levels of lists and dictionaries below and with this one, and what looking through all of it
  /// costs: 1 for each value and for each 16 bytes of text.
  struct Extent {
    int depth = 0;
    std::uint64_t weight = 1;
  };
  Extent extent() const;
  /// Python's name of the type, for messages.
  const char* type_name() const;

  /// Bounds on one value: they keep recursion bounded, and what a few nested lists can stand for
  /// ([x, x] of [y, y] ...).
  static constexpr int kDeepest = 200;
  static constexpr std::uint64_t kHeaviest = std::uint64_t{1} << 23;

 private:
  struct None {};
  std::variant<Undefined, None, bool, std::int64_t, double, std::shared_ptr<const StringData>,
               std::shared_ptr<const ListData>, std::shared_ptr<const DictData>,
               std::shared_ptr<IteratorData>, Namespace*, std::shared_ptr<LoopData>,
               std::shared_ptr<const Callable>, std::shared_ptr<const std::string>>
      data_;
};

struct StringData {
  std::string text;
  bool is_markup = false;
};

struct ListData {
  enum class Form { kList, kTuple, kView };
  Form form = Form::kList;
  Values items;
  Value::Extent extent;
};

struct DictData {
  std::vector<std::pair<Value, Value>> items;
  Value::Extent extent;
  /// Null if there is no such key.
  const Value* find(std::string_view key) const;
  const Value* find(const Value& key) const;

 private:
  friend class Value;
  std::unordered_map<std::string_view, std::size_t>
      index_;  // of string keys; filled for large dictionaries only
};

struct IteratorData {
  Values items;
  std::size_t next = 0;
  Value::Extent extent;
};

/// namespace(): the only thing that a template can change.
struct Namespace {
  std::unordered_map<std::string, Value> values;
};

/// The `loop` variable.
struct LoopData {
  Values items;
  std::size_t index = 0;
  Value::Extent extent;
};

inline const std::string& Value::as_string() const {
  return std::get<std::shared_ptr<const StringData>>(data_)->text;
}
inline bool Value::is_markup() const {
  return is_string() && std::get<std::shared_ptr<const StringData>>(data_)->is_markup;
}

/// Python's ==.
bool equal(const Value& a, const Value& b);
/// Python's <, throws TypeError if the two have no order.
bool less(const Value& a, const Value& b);

/// A fault that Python would raise; the interpreter adds template and line.
struct TypeError {
  std::string message;
};

}  // namespace heddle::data::jinja
