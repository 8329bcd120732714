// The filters of a template, in three tables: of texts, numbers, and sequences or any value.
#pragma once

#include <span>

#include "data/jinja/interpreter.h"

namespace heddle::data::jinja {

/// Arguments of a filter.
struct FilterCall {
  Interpreter& interpreter;
  const std::string& name;
  const Value& subject;
  const CallArguments& arguments;

  std::string text() const {
    interpreter.work(Interpreter::cost(subject));
    return to_text(subject, interpreter.max_bytes());
  }
  /// The items of the subject.
  Values items() const { return interpreter.items_of(subject); }
  ArgumentReader read(std::initializer_list<const char*> names) const {
    return {name, arguments, names};
  }
  void need_defined() const {
    if (subject.is_undefined()) interpreter.fail_undefined(subject.as_undefined());
  }
};

struct Filter {
  std::string_view name;
  Value (*apply)(const FilterCall&);
};

std::span<const Filter> text_filters();
std::span<const Filter> number_filters();
std::span<const Filter> sequence_filters();

}  // namespace heddle::data::jinja
