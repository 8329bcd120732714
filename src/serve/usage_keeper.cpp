#include "serve/usage_keeper.h"

#include "base/log.h"
#include "serve/store/data_directory.h"

namespace heddle::serve {
namespace {

constexpr double kSave_s = 10;

}  // namespace

void UsageKeeper::save() {
  std::vector<UsageTable::Row> rows;
  const std::vector<Quotas::Use> uses = quotas_.uses();
  for (const Quotas::Use& use : uses) {
    const Quotas::Use& old = saved_[use.tenant];
    const UsageTable::Row row{day_of(now_s()),
                              use.tenant,
                              use.requests - old.requests,
                              use.refused - old.refused,
                              use.trained - old.trained,
                              use.read - old.read,
                              use.generated - old.generated};
    if (row.requests + row.refused + row.trained + row.read + row.generated > 0)
      rows.push_back(row);
  }
  try {
    table_.add(rows);
  } catch (const FileError& error) {
    log::error("{}; the use of tenants is not written this time", error.what());
    return;
  }
  for (const Quotas::Use& use : uses) saved_[use.tenant] = use;
}

void UsageKeeper::serve() {
  save();
  server_.post_after(kSave_s, [this] { serve(); });
}

}  // namespace heddle::serve
