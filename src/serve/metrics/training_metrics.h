#pragma once

#include <cstdint>
#include <mutex>
#include <set>
#include <string>

#include "serve/metrics/registry.h"

namespace heddle::serve {

/// Metrics of what tenants train and of how long turns of their runs take. Calls may come from any
/// thread.
class TrainingMetrics {
 public:
  /// `registry` outlives it.
  explicit TrainingMetrics(Registry& registry);

  /// `kind`: of the requests that shared the turn.
  void turn(const std::string& kind, double seconds);
  void trained(const std::string& tenant, std::int64_t tokens);
  void stepped(const std::string& tenant);

  /// Counts at the moment.
  struct Now {
    std::int64_t promises = 0;  ///< Without an outcome.
    std::int64_t waiting = 0;   ///< Requests of runs that have not begun.
    std::int64_t runs = 0;      ///< In memory.
  };
  void now(const Now& now);

 private:
  Labels labels_of(const std::string& tenant);

  Registry& registry_;
  std::mutex mutex_;
  std::set<std::string> tenants_;  ///< Tenants with series of their own.
};

}  // namespace heddle::serve
