#pragma once

#include <cstdint>
#include <optional>
#include <string>

#include <nlohmann/json.hpp>

#include "serve/http/request.h"
#include "serve/tinker/known_fields.h"

namespace heddle::serve::tinker {

/// Fields of a JSON object of a client. Each reader throws HttpError 422 that names the field, what
/// was expected and what was found. null counts as not given.
class Fields {
 public:
  /// Parses a body. Throws HttpError 422 unless it is a JSON object, and for a field with a value
  /// that is not known.
  Fields(const std::string& body, const Known& known);
  /// An object inside another; `where`: its name, for messages.
  Fields(const nlohmann::json& object, std::string where, const Known& known);

  std::string text(const char* name) const;
  std::string text(const char* name, const std::string& otherwise) const;
  std::optional<std::string> maybe_text(const char* name) const;
  std::int64_t integer(const char* name) const;
  std::int64_t integer(const char* name, std::int64_t otherwise) const;
  std::optional<std::int64_t> maybe_integer(const char* name) const;
  double number(const char* name, double otherwise) const;
  bool boolean(const char* name, bool otherwise) const;
  std::optional<bool> maybe_boolean(const char* name) const;
  Fields object(const char* name, const Known& known) const;
  /// Whether it is given, be it as null.
  bool contains(const char* name) const { return value_.contains(name); }
  /// Null if it is not given.
  const nlohmann::json* find(const char* name) const;
  const nlohmann::json& list(const char* name) const;

  const std::string& where() const { return where_; }
  [[noreturn]] void refuse(const char* name, const char* expected) const;
  /// Throws HttpError 422 for a field with a value that is not among these.
  void require_known(const Known& known) const;

 private:
  nlohmann::json value_;
  std::string where_;
};

/// The part of a list that the query of an address asks for. Throws HttpError 422.
struct Page {
  std::int64_t limit, offset;
};
Page page_of(const Request& request);
/// Throws HttpError 422 for a name of the query that is not known, and where it asks for a scope or
/// a project that this server does not have.
void check_query(const Request& request, const Known& known);

/// The one project, as answers call it.
inline constexpr const char* kOnlyProject = "default";

/// Answer of a request that fails, for routes.
std::string error_body(int status, const std::string& message);

/// JSON text; bytes that are not UTF-8 become U+FFFD.
std::string dump(const nlohmann::json& value);

}  // namespace heddle::serve::tinker
