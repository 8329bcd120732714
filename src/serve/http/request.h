#pragma once

#include <cstdint>
#include <map>
#include <memory>
#include <optional>
#include <set>
#include <string>
#include <string_view>
#include <utility>

#include "base/errors.h"
#include "serve/http/limits.h"

namespace heddle::serve {

/// A failure that has an HTTP status. A handler may throw it; the route's ErrorBody words it.
class HttpError : public Error {
 public:
  /// `retry_after_s`: seconds of the header Retry-After; 0: no header.
  HttpError(int status, const std::string& message, int retry_after_s = 0,
            std::map<std::string, std::string> headers = {})
      : Error(message), status_(status), headers_(std::move(headers)) {
    if (retry_after_s > 0) headers_["Retry-After"] = std::to_string(retry_after_s);
  }
  int status() const { return status_; }
  /// Headers of the answer.
  const std::map<std::string, std::string>& headers() const { return headers_; }

 private:
  int status_;
  std::map<std::string, std::string> headers_;
};

/// Message to a client for a FileError, which itself names files of the server.
inline constexpr const char* kFilesFail =
    "the server cannot read or write its own files, as where its disk is full: try again later; "
    "its log says why";

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
  Limits limits = {};  ///< The key's, else the server's.

  bool may(const std::string& scope) const { return scopes.contains(scope); }
};

/// Use that a request makes of its tenant's quotas. Its calls may come from any thread.
class Meter {
 public:
  /// kRead: tokens of prompts, and of passes that train nothing.
  enum class Tokens { kTrained, kRead, kGenerated };
  virtual ~Meter() = default;
  virtual void add_tokens(Tokens kind, std::int64_t count) = 0;
  /// Why work that takes tokens has to wait; nothing if it need not.
  struct Wait {
    double seconds;
    std::string reason;
  };
  virtual std::optional<Wait> wait() = 0;
  /// The request's work has ended: before its answer is sent, as the client may ask again at once.
  /// The last holder's end says so too.
  virtual void finish() = 0;
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
  std::shared_ptr<Meter> meter;  ///< Null: nobody counts.
  bool is_replay = false;  ///< Did not come now, but before a restart; nobody waits for the answer.

  /// Empty if the client did not send it.
  std::string_view header(const std::string& lower_case_name) const {
    const auto found = headers.find(lower_case_name);
    return found == headers.end() ? std::string_view() : std::string_view(found->second);
  }
};

}  // namespace heddle::serve
