#pragma once

#include <functional>
#include <map>
#include <memory>
#include <optional>
#include <string>
#include <string_view>
#include <vector>

#include "serve/http/request.h"
#include "serve/http/responder.h"

namespace heddle::serve {

/// Answers a request, now or later, through its responder. What it throws becomes an error answer.
using Handler = std::function<void(Request&&, Responder)>;
/// Answers a request whose body is too large or cannot be decoded: `body` is what is known of it.
using Refusal = std::function<void(Request&&, Responder, const HttpError&)>;
/// The JSON text of an error answer, as the API of the route words them.
using ErrorBody = std::function<std::string(int status, const std::string& message)>;

/// How a route counts against its caller's quotas. Only kGeneration is refused where no tokens are
/// left: other work waits for them by Meter::wait().
enum class Cost { kNone, kRequest, kGeneration };

/// A request that quotas have let in.
struct Admission {
  std::shared_ptr<Meter> meter;
  Headers headers;  ///< The answer's, whatever it is.
};

struct Route {
  std::string method;   ///< "GET", "POST", "PUT", "DELETE"
  std::string pattern;  ///< "/runs/{run}/checkpoints/{id+}"; {id+} matches one segment or more.
  Handler handler;
  ErrorBody error_body;
  std::string scope;       ///< Right that the caller's key must have; empty: none.
  bool is_public = false;  ///< No key is asked for.
  /// Runs on the server's worker thread instead of the loop's: for handlers that parse large bodies
  /// or touch the disk.
  bool on_worker = false;
  Cost cost = Cost::kNone;
  /// In the handler's place, on its thread; without it the error is the answer.
  Refusal refusal = {};
};

/// The route that answers a path.
class Router {
 public:
  void add(Route route) { routes_.push_back(std::move(route)); }

  struct Match {
    const Route* route = nullptr;  ///< Null: no route has this path (404) or this method (405).
    std::map<std::string, std::string> parameters;
    bool has_path = false;  ///< Some route has the path.
    std::string methods;    ///< Methods of the path, with commas, where none is the one asked for.
    ErrorBody error_body;   ///< For a path without a route: the nearest one's.
  };
  /// `path`: as it came, percent-encoded; parameters are decoded. The first of the routes in the
  /// order they were added wins.
  Match find(std::string_view method, std::string_view path) const;

 private:
  std::vector<Route> routes_;
};

/// Undoes %41 in a path or query (and + in a query). Returns nothing for a broken escape or a zero
/// byte.
std::optional<std::string> percent_decoded(std::string_view text, bool is_query);

}  // namespace heddle::serve
