#include <algorithm>

#include "data/jinja/filter.h"

namespace heddle::data::jinja {
namespace {

/// Filters that leave the mark of `safe` on a text, as Python's methods of Markup do.
constexpr std::string_view kKeepMarkup[] = {"capitalize", "center", "indent", "lower",
                                            "reverse",    "string", "trim",   "upper"};

const Filter* find_filter(std::string_view name) {
  for (const std::span<const Filter> filters :
       {text_filters(), number_filters(), sequence_filters()}) {
    const auto found = std::find_if(filters.begin(), filters.end(),
                                    [&](const Filter& filter) { return filter.name == name; });
    if (found != filters.end()) return &*found;
  }
  return nullptr;
}

}  // namespace

bool is_filter(std::string_view name) { return find_filter(name) != nullptr; }

Value apply_filter(Interpreter& interpreter, const std::string& name, const Value& subject,
                   const CallArguments& arguments) {
  // Jinja too asks for the filter where it is used, not where the template is read.
  const Filter* filter = find_filter(name);
  if (filter == nullptr) throw TypeError{fmt::format("filter '{}' is not supported", name)};
  interpreter.work(1);
  Value result = filter->apply({interpreter, name, subject, arguments});
  if (result.is_string()) interpreter.built(result.as_string().size());
  if (subject.is_markup() && result.is_string() &&
      std::find(std::begin(kKeepMarkup), std::end(kKeepMarkup), name) != std::end(kKeepMarkup)) {
    return Value::string(result.as_string(), true);
  }
  return result;
}

}  // namespace heddle::data::jinja
