#include "serve/tinker/fields.h"

#include <algorithm>
#include <cmath>
#include <cstdlib>

#include "base/json.h"
#include "base/quote.h"
#include "serve/http/body.h"

namespace heddle::serve::tinker {

using nlohmann::json;

constexpr std::int64_t kMostPage = 1000;

Fields::Fields(const std::string& body) {
  try {
    value_ = heddle::json::parse<json>(body, {.values = kMostJsonValues});
  } catch (const DataError& error) {
    throw_http(422, "the body is no JSON: {}", error.what());
  }
  if (!value_.is_object()) throw HttpError(422, "the body must be a JSON object");
}

Fields::Fields(const json& object, std::string where) : value_(object), where_(std::move(where)) {
  if (!value_.is_object()) throw_http(422, "{} must be a JSON object", where_);
}

const json* Fields::find(const char* name) const {
  const auto found = value_.find(name);
  return found == value_.end() || found->is_null() ? nullptr : &*found;
}

void Fields::refuse(const char* name, const char* expected) const {
  const auto found = value_.find(name);
  const json* value = found == value_.end() ? nullptr : &*found;
  throw_http(422, "field {}{}{}: expected {}, found {}", where_, where_.empty() ? "" : ".", name,
             expected,
             value == nullptr
                 ? "nothing"
                 : text::shown(value->dump(-1, ' ', false, json::error_handler_t::replace), 60));
}

std::optional<std::string> Fields::maybe_text(const char* name) const {
  const json* value = find(name);
  if (value == nullptr) return std::nullopt;
  if (!value->is_string()) refuse(name, "a string");
  return value->get<std::string>();
}

std::string Fields::text(const char* name) const {
  const auto value = maybe_text(name);
  if (!value) refuse(name, "a string");
  return *value;
}

std::string Fields::text(const char* name, const std::string& otherwise) const {
  return maybe_text(name).value_or(otherwise);
}

std::optional<std::int64_t> Fields::maybe_integer(const char* name) const {
  const json* value = find(name);
  if (value == nullptr) return std::nullopt;
  const bool is_too_large = value->is_number_unsigned() && value->get<std::uint64_t>() > INT64_MAX;
  if (!value->is_number_integer() || is_too_large) refuse(name, "a whole number");
  return value->get<std::int64_t>();
}

std::int64_t Fields::integer(const char* name) const {
  const auto value = maybe_integer(name);
  if (!value) refuse(name, "a whole number");
  return *value;
}

std::int64_t Fields::integer(const char* name, std::int64_t otherwise) const {
  return maybe_integer(name).value_or(otherwise);
}

double Fields::number(const char* name, double otherwise) const {
  const auto value = value_.find(name);
  if (value == value_.end()) return otherwise;
  // Clients write NaN and infinity as null.
  if (!value->is_number() || !std::isfinite(value->get<double>())) refuse(name, "a finite number");
  return value->get<double>();
}

std::optional<bool> Fields::maybe_boolean(const char* name) const {
  const json* value = find(name);
  if (value == nullptr) return std::nullopt;
  if (!value->is_boolean()) refuse(name, "true or false");
  return value->get<bool>();
}

bool Fields::boolean(const char* name, bool otherwise) const {
  return maybe_boolean(name).value_or(otherwise);
}

Fields Fields::object(const char* name) const {
  const json* value = find(name);
  if (value == nullptr || !value->is_object()) refuse(name, "an object");
  return Fields(*value, where_.empty() ? name : where_ + "." + name);
}

const json& Fields::list(const char* name) const {
  const json* value = find(name);
  if (value == nullptr || !value->is_array()) refuse(name, "a list");
  return *value;
}

Page page_of(const Request& request) {
  const auto whole = [&](const char* name, std::int64_t otherwise) {
    const auto found = request.query.find(name);
    if (found == request.query.end()) return otherwise;
    char* end = nullptr;
    const std::int64_t value = std::strtoll(found->second.c_str(), &end, 10);
    if (*end != '\0' || value < 0 || found->second.empty())
      throw_http(422, "{} is {}: expected a count", name, text::shown(found->second, 40));
    return value;
  };
  return {std::min(whole("limit", 20), kMostPage), whole("offset", 0)};
}

std::string error_body(int, const std::string& message) { return dump({{"detail", message}}); }

std::string dump(const nlohmann::json& value) {
  return value.dump(-1, ' ', false, nlohmann::json::error_handler_t::replace);
}

}  // namespace heddle::serve::tinker
