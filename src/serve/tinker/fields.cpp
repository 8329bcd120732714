#include "serve/tinker/fields.h"

#include <algorithm>
#include <cmath>
#include <cstdlib>

#include "base/json.h"
#include "base/quote.h"
#include "base/text.h"
#include "serve/http/body.h"

namespace heddle::serve::tinker {

using nlohmann::json;

namespace {

constexpr std::int64_t kMostPage = 1000;

bool has_name(std::string_view names, std::string_view name) {
  while (!names.empty()) {
    const std::size_t end = std::min(names.find(' '), names.size());
    if (names.substr(0, end) == name) return true;
    names.remove_prefix(std::min(end + 1, names.size()));
  }
  return false;
}

bool has_name(const Known& known, std::string_view name) {
  return has_name(known.taken, name) || has_name(known.notes, name);
}

std::string list_of(const Known& known) {
  std::string list;
  for (const std::string& each : text::split(known.taken, ' '))
    list += (list.empty() ? "" : ", ") + each;
  return list;
}

}  // namespace

Fields::Fields(const std::string& body, const Known& known) {
  try {
    value_ = heddle::json::parse<json>(body, {.values = kMostJsonValues});
  } catch (const DataError& error) {
    throw_http(422, "the body is no JSON: {}", error.what());
  }
  if (!value_.is_object()) throw HttpError(422, "the body must be a JSON object");
  require_known(known);
}

Fields::Fields(const json& object, std::string where, const Known& known)
    : value_(object), where_(std::move(where)) {
  if (!value_.is_object()) throw_http(422, "{} must be a JSON object", where_);
  require_known(known);
}

void Fields::require_known(const Known& known) const {
  if (known.taken == known::kAny.taken) return;
  for (const auto& [name, value] : value_.items()) {
    if (value.is_null() || has_name(known, name)) continue;
    throw_http(422, "field {}{}{} is not known: expected one of {}", where_,
               where_.empty() ? "" : ".", text::shown(name, 60), list_of(known));
  }
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

Fields Fields::object(const char* name, const Known& known) const {
  const json* value = find(name);
  if (value == nullptr || !value->is_object()) refuse(name, "an object");
  return Fields(*value, where_.empty() ? name : where_ + "." + name, known);
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

void check_query(const Request& request, const Known& known) {
  for (const auto& [name, value] : request.query) {
    if (!has_name(known, name))
      throw_http(422, "{} is not known in the query of {}: expected one of {}",
                 text::shown(name, 60), text::shown(request.path, 100), list_of(known));
    if (name == "access_scope" && value != "owned" && value != "accessible")
      throw_http(422, "access_scope is {}: expected owned or accessible", text::shown(value, 40));
    if (name == "project_id" && value != kOnlyProject)
      throw_http(400, "project_id is {}: this server has one project, which is '{}'",
                 text::shown(value, 60), kOnlyProject);
  }
}

std::string error_body(int, const std::string& message) { return dump({{"detail", message}}); }

std::string dump(const nlohmann::json& value) {
  return value.dump(-1, ' ', false, nlohmann::json::error_handler_t::replace);
}

}  // namespace heddle::serve::tinker
