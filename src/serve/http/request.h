#pragma once

#include <map>
#include <set>
#include <string>
#include <string_view>

#include "base/errors.h"

namespace heddle::serve {

/// A failure that has an HTTP status. A handler may throw it; the route's ErrorBody words it.
class HttpError : public Error {
 public:
  HttpError(int status, const std::string& message, int retry_after_s = 0)
      : Error(message), status_(status), retry_after_s_(retry_after_s) {}
  int status() const { return status_; }
  /// Seconds of the header Retry-After; 0: no header.
  int retry_after_s() const { return retry_after_s_; }

 private:
  int status_, retry_after_s_;
};

/// throw_http(404, "model '{}' is not known", name)
template <class... Args>
[[noreturn]] void throw_http(int status, fmt::format_string<Args...> format, Args&&... args) {
  throw HttpError(status, fmt::format(format, std::forward<Args>(args)...));
}

/// Who asks: the owner of the key that came with a request.
struct Caller {
  std::string tenant;      ///< "local" where the server has no keys.
  std::string key_prefix;  ///< First characters of the key, for logs; empty without a key.
  std::set<std::string> scopes;

  bool may(const std::string& scope) const { return scopes.contains(scope); }
};

struct Request {
  std::string id;      ///< x-request-id as the client sent it, else drawn at random.
  std::string method;  ///< "GET", "POST", "PUT", "DELETE"
  std::string path;    ///< Decoded, without the query.
  std::map<std::string, std::string> query;
  std::map<std::string, std::string> parameters;  ///< Matches of {name} in the pattern.
  std::map<std::string, std::string> headers;     ///< Names in lower case.
  std::string body;                               ///< Content-Encoding undone.
  Caller caller;
  bool is_replay = false;  ///< Did not come now, but before a restart; nobody waits for the answer.

  /// Empty if the client did not send it.
  std::string_view header(const std::string& lower_case_name) const {
    const auto found = headers.find(lower_case_name);
    return found == headers.end() ? std::string_view() : std::string_view(found->second);
  }
};

}  // namespace heddle::serve
