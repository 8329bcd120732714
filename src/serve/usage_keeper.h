#pragma once

#include <map>
#include <string>

#include "serve/http/server.h"
#include "serve/quotas.h"
#include "serve/store/usage.h"

namespace heddle::serve {

/// Writes what tenants use into the data directory, every few seconds. Of the loop's thread.
class UsageKeeper {
 public:
  /// All of them outlive it.
  UsageKeeper(Server& server, const Quotas& quotas, Database& database)
      : server_(server), quotas_(quotas), table_(database) {}

  void serve();
  /// Writes what was used since the last time. What the disk does not take is logged, and written
  /// the next time.
  void save();

 private:
  Server& server_;
  const Quotas& quotas_;
  UsageTable table_;
  std::map<std::string, Quotas::Use> saved_;
};

}  // namespace heddle::serve
