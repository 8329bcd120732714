#include "serve/openai/error.h"

#include <utility>

#include "data/json/json_text.h"

namespace heddle::serve::openai {
namespace {

const char* type_of(int status) {
  switch (status) {
    case 401:
      return "authentication_error";
    case 403:
      return "permission_error";
    case 429:
      return "rate_limit_error";
    default:
      return status < 500 ? "invalid_request_error" : "server_error";
  }
}

Json or_null(const std::string& text) { return text.empty() ? Json() : Json(text); }

}  // namespace

Json error_object(int status, const std::string& message, const std::string& field,
                  const std::string& code) {
  std::string kind = code;
  if (kind.empty() && status == 503) kind = "overloaded";
  if (kind.empty() && status == 429) kind = "rate_limit_exceeded";
  return {{"error",
           {{"message", message},
            {"type", type_of(status)},
            {"param", or_null(field)},
            {"code", or_null(kind)}}}};
}

std::string error_body(int status, const std::string& message) {
  return dump(error_object(status, message));
}

Handler answering(Handler handler) {
  return [handler = std::move(handler)](Request&& request, const Responder& responder) {
    try {
      handler(std::move(request), responder);
    } catch (const ApiError& error) {
      responder.answer(error.status(), dump(error_object(error.status(), error.what(),
                                                         error.field(), error.code())));
    } catch (const UserError& error) {
      // A conversation that its template refuses, a text that is no JSON.
      responder.answer(400, dump(error_object(400, error.what())));
    }
  };
}

std::string dump(const Json& value) { return data::json_text::dump(value); }

}  // namespace heddle::serve::openai
