#pragma once

#include <cstdint>

namespace heddle::serve {

/// Bounds of a tenant's use; 0: no limit.
struct Limits {
  std::int64_t requests_per_minute = 0;
  std::int64_t tokens_per_minute = 0;
  std::int64_t max_concurrent = 0;  ///< Requests for answers of the model under way.
  std::int64_t max_runs = 0;        ///< Training runs in memory.
  std::int64_t max_disk_bytes = 0;  ///< Saved weights.
};

/// One of the limits, for settings, keys and messages.
struct LimitRow {
  const char* name;
  std::int64_t Limits::*member;
  const char* meaning;
};

inline constexpr LimitRow kLimitRows[] = {
    {"requests_per_minute", &Limits::requests_per_minute,
     "requests of one tenant that train, save or sample, a minute"},
    {"tokens_per_minute", &Limits::tokens_per_minute,
     "tokens of one tenant, trained, read and generated, a minute"},
    {"max_concurrent", &Limits::max_concurrent,
     "requests for answers of one tenant at the same time"},
    {"max_runs", &Limits::max_runs, "training runs in memory, of one tenant"},
    {"max_disk_bytes", &Limits::max_disk_bytes, "bytes of saved weights, of one tenant"},
};

}  // namespace heddle::serve
