#include "serve/store/audit.h"

#include <algorithm>

#include "serve/store/data_directory.h"

namespace heddle::serve {

void Audit::note(const Caller& caller, const std::string& event, const std::string& object) {
  Statement(database_,
            "INSERT INTO audit(time, tenant, key_prefix, event, object) VALUES (?, ?, ?, ?, ?)")
      .bind(now_s())
      .bind(caller.tenant)
      .bind(caller.key_prefix)
      .bind(event)
      .bind(object)
      .run();
}

std::vector<Audit::Entry> Audit::list(double from, double until, std::int64_t most,
                                      const std::string& tenant) const {
  Statement rows(database_,
                 "SELECT time, tenant, key_prefix, event, object FROM audit WHERE time >= ? AND "
                 "time < ? AND (? = '' OR tenant = ?) ORDER BY time DESC, id DESC LIMIT ?");
  rows.bind(from).bind(until).bind(tenant).bind(tenant).bind(most);
  std::vector<Entry> entries;
  while (rows.step())
    entries.push_back({rows.real(0), rows.text(1), rows.text(2), rows.text(3), rows.text(4)});
  std::ranges::reverse(entries);
  return entries;
}

void Audit::sweep() {
  Statement(database_, "DELETE FROM audit WHERE time < ?").bind(now_s() - kKept_s).run();
}

}  // namespace heddle::serve
