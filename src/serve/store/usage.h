#pragma once

#include <cstdint>
#include <string>
#include <vector>

#include "serve/store/database.h"

namespace heddle::serve {

/// Use of tenants on each day (UTC): the table of a data directory.
class UsageTable {
 public:
  struct Row {
    std::string day;  ///< 2026-11-28
    std::string tenant;
    std::int64_t requests = 0, refused = 0;
    std::int64_t trained = 0;    ///< Tokens of forward_backward.
    std::int64_t read = 0;       ///< Tokens of prompts and of forward.
    std::int64_t generated = 0;  ///< Tokens.
  };

  explicit UsageTable(Database& database) : database_(database) {}
  /// Adds to the rows of these days and tenants, all or none of them.
  void add(const std::vector<Row>& rows);
  /// Rows from a day on, by day and tenant.
  std::vector<Row> list(const std::string& first_day) const;

 private:
  Database& database_;
};

/// The day (UTC) of a time in seconds since 1970.
std::string day_of(double seconds);

}  // namespace heddle::serve
