#include "serve/store/usage.h"

#include "serve/store/data_directory.h"

namespace heddle::serve {

void UsageTable::add(const std::vector<Row>& rows) {
  if (rows.empty()) return;
  Transaction together(database_);
  for (const Row& row : rows) {
    Statement(database_,
              "INSERT INTO usage(day, tenant, requests, refused, trained, read, generated) VALUES "
              "(?, ?, ?, ?, ?, ?, ?) ON CONFLICT(day, tenant) DO UPDATE SET "
              "requests = requests + excluded.requests, refused = refused + excluded.refused, "
              "trained = trained + excluded.trained, read = read + excluded.read, "
              "generated = generated + excluded.generated")
        .bind(row.day)
        .bind(row.tenant)
        .bind(row.requests)
        .bind(row.refused)
        .bind(row.trained)
        .bind(row.read)
        .bind(row.generated)
        .run();
  }
  together.commit();
}

std::vector<UsageTable::Row> UsageTable::list(const std::string& first_day) const {
  Statement rows(database_,
                 "SELECT day, tenant, requests, refused, trained, read, generated FROM usage WHERE "
                 "day >= ? ORDER BY day, tenant");
  rows.bind(first_day);
  std::vector<Row> found;
  while (rows.step())
    found.push_back({rows.text(0), rows.text(1), rows.integer(2), rows.integer(3), rows.integer(4),
                     rows.integer(5), rows.integer(6)});
  return found;
}

std::string day_of(double seconds) { return as_utc(seconds).substr(0, 10); }

}  // namespace heddle::serve
