#pragma once

#include <cstdint>
#include <string>
#include <vector>

#include "serve/http/request.h"
#include "serve/store/database.h"

namespace heddle::serve {

/// Who made, read, shared or removed what: the table of a data directory. Calls are made by the
/// thread of its database.
class Audit {
 public:
  static constexpr double kKept_s = 90.0 * 24 * 3600;

  explicit Audit(Database& database) : database_(database) {}

  /// `event`: RESOURCE_ACTION, as checkpoint_delete; `object`: the name of the resource.
  void note(const Caller& caller, const std::string& event, const std::string& object);

  struct Entry {
    double time = 0;  ///< Seconds since 1970.
    std::string tenant, key_prefix, event, object;
  };
  /// Entries from one time to another in their order, the last `most` of them. An empty tenant:
  /// everybody's.
  std::vector<Entry> list(double from, double until, std::int64_t most,
                          const std::string& tenant = "") const;
  /// Removes entries that are older than kKept_s.
  void sweep();

 private:
  Database& database_;
};

}  // namespace heddle::serve
