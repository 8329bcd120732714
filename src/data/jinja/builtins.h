#pragma once

#include <optional>
#include <string>
#include <string_view>

#include <fmt/format.h>

#include "data/jinja/callable.h"
#include "data/jinja/value.h"

/// The filters, tests, functions and methods that a template can use. Faults are thrown as
/// TypeError.
namespace heddle::data::jinja {

class Interpreter;

bool is_filter(std::string_view name);
bool is_test(std::string_view name);
/// A name that means a function unless the template or its caller gives it another value: range,
/// namespace, ...
bool is_function(std::string_view name);

Value apply_filter(Interpreter& interpreter, const std::string& name, const Value& subject,
                   const CallArguments& arguments);
bool apply_test(Interpreter& interpreter, const std::string& name, const Value& subject,
                const CallArguments& arguments);
Value call_function(Interpreter& interpreter, const std::string& name,
                    const CallArguments& arguments);

/// True if values of that type have a method of the name that a template may call.
bool has_method(const Value& self, std::string_view name);
/// True for a method that would change a list or dictionary: the sandbox hides it.
bool is_forbidden_method(const Value& self, std::string_view name);
Value call_method(Interpreter& interpreter, const Value& self, const std::string& name,
                  const CallArguments& arguments);

/// Reads the arguments of one call by position or name. What is missing, unknown or given twice is
/// a TypeError.
class ArgumentReader {
 public:
  ArgumentReader(std::string_view function, const CallArguments& arguments,
                 std::initializer_list<const char*> names);

  bool has(int index) const { return values_[index] != nullptr; }
  const Value& at(int index) const;
  /// Absent or None: nullopt.
  std::optional<std::string> string(int index) const;
  std::int64_t integer(int index, std::int64_t otherwise) const;
  bool boolean(int index, bool otherwise) const {
    return has(index) ? at(index).truthy() : otherwise;
  }

 private:
  std::string function_;
  std::vector<const char*> names_;
  std::vector<const Value*> values_;
};

/// Text that grows up to a bound; TypeError beyond.
class TextSink {
 public:
  explicit TextSink(std::size_t max_bytes) : max_bytes_(max_bytes) {}
  TextSink& add(std::string_view text) {
    if (text.size() > max_bytes_ - text_.size())
      throw TypeError{fmt::format("a text of more than {} bytes", max_bytes_)};
    text_.append(text);
    return *this;
  }
  std::string take() { return std::move(text_); }
  std::size_t size() const { return text_.size(); }

 private:
  std::string text_;
  std::size_t max_bytes_;
};

/// The items that `for` would see. An iterator is used up. Interpreter::items_of counts the work.
Values iterate(const Value& value);
/// len(); TypeError for what has none.
std::int64_t length(const Value& value);
/// str().
std::string to_text(const Value& value, std::size_t max_bytes);
/// repr().
std::string to_repr(const Value& value, std::size_t max_bytes);
/// json.dumps(ensure_ascii=False). `indent` < 0: one line.
struct JsonStyle {
  bool ensure_ascii = false;
  int indent = -1;
  std::string indent_text;  // used if indent < 0 and not empty
  std::string item_separator = ", ";
  std::string key_separator = ": ";
  bool sort_keys = false;
};
std::string to_json(const Value& value, const JsonStyle& style, std::size_t max_bytes);

Value add(const Value& a, const Value& b, std::size_t max_bytes);
Value subtract(const Value& a, const Value& b);
Value multiply(const Value& a, const Value& b, std::size_t max_bytes);
Value divide(const Value& a, const Value& b);
Value floor_divide(const Value& a, const Value& b);
Value modulo(const Value& a, const Value& b);
Value power(const Value& a, const Value& b);
bool contains(const Value& container, const Value& item);
/// `%` on a string.
Value format_percent(const Value& format, const Value& arguments, std::size_t max_bytes);
/// str.format.
Value format_braces(const Value& format, const CallArguments& arguments, std::size_t max_bytes);
/// The text with & < > ' " as HTML entities; markup stays as it is.
std::string escaped(const Value& value, std::size_t max_bytes);

}  // namespace heddle::data::jinja
