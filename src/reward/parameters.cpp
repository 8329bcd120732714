#include "reward/parameters.h"

#include <algorithm>
#include <utility>

#include "base/errors.h"
#include "base/json.h"
#include "base/quote.h"
#include "base/text.h"

namespace heddle::reward {

Parameters::Parameters(const Json& values, std::string where)
    : values_(values), where_(std::move(where)) {
  if (!values_.is_object() && !values_.is_null()) {
    throw_error<ConfigError>("{}: expected parameters by name (name: value), found {}", where_,
                             json::shown(values_));
  }
}

const Json* Parameters::find(const std::string& name) {
  known_.insert(name);
  if (!values_.is_object()) return nullptr;
  const auto found = values_.find(name);
  return found == values_.end() || found->is_null() ? nullptr : &*found;
}

void Parameters::refuse(const std::string& name, const std::string& why) const {
  throw_error<ConfigError>("{}: {}: {}", where_, name, why);
}

std::string Parameters::text(const std::string& name, const std::string& otherwise) {
  const Json* value = find(name);
  if (value == nullptr) return otherwise;
  if (!value->is_string()) refuse(name, "expected text, found " + json::shown(*value));
  return value->get<std::string>();
}

std::string Parameters::choice(const std::string& name, const std::string& otherwise,
                               const std::vector<std::string>& choices) {
  const std::string value = text(name, otherwise);
  if (std::find(choices.begin(), choices.end(), value) == choices.end()) {
    refuse(name, fmt::format("expected one of {}, found '{}'", text::join(choices, ", "),
                             text::shown(value)));
  }
  return value;
}

double Parameters::number(const std::string& name, double otherwise, double least, double most) {
  const Json* value = find(name);
  if (value == nullptr) return otherwise;
  if (!value->is_number() || !(value->get<double>() >= least && value->get<double>() <= most)) {
    refuse(name, fmt::format("expected a number from {} to {}, found {}", least, most,
                             json::shown(*value)));
  }
  return value->get<double>();
}

std::int64_t Parameters::integer(const std::string& name, std::int64_t otherwise,
                                 std::int64_t least, std::int64_t most) {
  const Json* value = find(name);
  if (value == nullptr) return otherwise;
  const bool fits = value->is_number_integer() &&
                    (!value->is_number_unsigned() ||
                     value->get<std::uint64_t>() <= static_cast<std::uint64_t>(INT64_MAX)) &&
                    value->get<std::int64_t>() >= least && value->get<std::int64_t>() <= most;
  if (!fits) {
    refuse(name, fmt::format("expected a whole number from {} to {}, found {}", least, most,
                             json::shown(*value)));
  }
  return value->get<std::int64_t>();
}

bool Parameters::flag(const std::string& name, bool otherwise) {
  const Json* value = find(name);
  if (value == nullptr) return otherwise;
  if (!value->is_boolean()) refuse(name, "expected true or false, found " + json::shown(*value));
  return value->get<bool>();
}

std::vector<std::string> Parameters::texts(const std::string& name,
                                           std::vector<std::string> otherwise) {
  const Json* value = find(name);
  if (value == nullptr) return otherwise;
  const bool fits =
      value->is_array() &&
      std::all_of(value->begin(), value->end(), [](const Json& one) { return one.is_string(); });
  if (!fits) refuse(name, "expected a list of texts, found " + json::shown(*value));
  return value->get<std::vector<std::string>>();
}

void Parameters::finish() const {
  if (!values_.is_object()) return;
  for (const auto& [name, value] : values_.items()) {
    if (known_.contains(name)) continue;
    const std::vector<std::string> names(known_.begin(), known_.end());
    const std::string nearest = text::nearest(name, names);
    refuse(name, nearest.empty() ? "there is no such parameter; known: " + text::join(names, ", ")
                                 : "there is no such parameter; did you mean " + nearest + "?");
  }
}

}  // namespace heddle::reward
