#pragma once

#include <cstdint>
#include <map>
#include <memory>
#include <string>
#include <vector>

#include "serve/http/request.h"
#include "serve/http/router.h"

namespace heddle::serve {

/// Requests and tokens that tenants use, against the limits of the key that they ask with. A limit
/// a minute is a bucket: full at first, and filled evenly. Tokens are taken once they are known, so
/// a request is let in while any are left, and what it takes too much is paid back by the next
/// one's wait. All functions may be called from any thread.
class Quotas {
 public:
  Quotas();

  /// Lets a request in, or throws HttpError 429 with Retry-After and the x-ratelimit headers.
  Admission admit(const Caller& caller, Cost cost);

  struct Use {
    std::string tenant;
    // Since the server's start:
    std::int64_t requests = 0, refused = 0;
    std::int64_t trained = 0, read = 0, generated = 0;  ///< Tokens, as Meter::Tokens has them.
    std::int64_t concurrent = 0;                        ///< At the moment.

    std::int64_t tokens() const { return trained + read + generated; }
  };
  std::vector<Use> uses() const;

 private:
  class State;
  class Ticket;
  std::shared_ptr<State> state_;
};

}  // namespace heddle::serve
