#pragma once

#include <string>

#include <nlohmann/json.hpp>

#include "serve/http/router.h"

namespace heddle::serve::openai {

using Json = nlohmann::ordered_json;

/// The code of a refusal of a model's name.
inline constexpr const char* kUnknownModel = "model_not_found";

/// A refusal that names the field of the request and the kind of the fault, as OpenAI's API does.
class ApiError : public HttpError {
 public:
  ApiError(int status, const std::string& message, std::string field, std::string code = "")
      : HttpError(status, message), field_(std::move(field)), code_(std::move(code)) {}
  const std::string& field() const { return field_; }  ///< Empty: none is to blame.
  const std::string& code() const { return code_; }

 private:
  std::string field_, code_;
};

/// throw_field("top_p", "is {}: expected a probability", top_p): a 400 that names the field.
template <class... Args>
[[noreturn]] void throw_field(const std::string& field, fmt::format_string<Args...> format,
                              Args&&... args) {
  throw ApiError(
      400, fmt::format("'{}' {}", field, fmt::format(format, std::forward<Args>(args)...)), field);
}

/// {"error": {"message", "type", "param", "code"}}; an empty field or code is null.
Json error_object(int status, const std::string& message, const std::string& field = "",
                  const std::string& code = "");
/// For routes: an error that says no more than a status.
std::string error_body(int status, const std::string& message);
/// A handler whose ApiErrors are answered with field and code.
Handler answering(Handler handler);

/// JSON text; bytes that are not UTF-8 become U+FFFD.
std::string dump(const Json& value);

}  // namespace heddle::serve::openai
