#pragma once

#include <cstdint>
#include <map>
#include <optional>
#include <set>
#include <string>
#include <vector>

#include "serve/http/request.h"
#include "serve/store/database.h"

namespace heddle::serve {

/// First characters of a key, which may be shown.
std::string begin_of(const std::string& key);

/// API keys of tenants. The database holds hashes: a key itself is shown once.
class Keys {
 public:
  explicit Keys(Database& database) : database_(database) {}

  struct Entry {
    std::int64_t id = 0;
    std::string tenant, prefix;
    std::string scopes;  ///< A grant has "reads" and its checkpoint.
    double created = 0;
    std::optional<double> revoked, expires;
    std::map<std::string, std::int64_t> limits;  ///< Names of kLimitRows; others are the server's.
  };

  /// A new key, "tml-" and 64 digits. Throws ConfigError for a tenant that is no plain name and for
  /// an unknown scope; `scopes`: of train, sample, admin, read, with commas; `expires`: as now_s().
  std::string add(const std::string& tenant, const std::string& scopes,
                  const std::map<std::string, std::int64_t>& limits = {},
                  std::optional<double> expires = {});
  /// A new key with which others load and copy this checkpoint, and nothing else. Throws
  /// ConfigError for a checkpoint that is not known.
  std::string grant(const std::string& checkpoint, std::optional<double> expires = {});
  std::vector<Entry> list() const;
  /// By number, prefix or the whole key. Throws ConfigError for none or several.
  Entry revoke(const std::string& number_or_prefix);
  /// No key was ever made but grants.
  bool is_empty() const;

  /// Who a key belongs to; nothing for one that is unknown, revoked or expired. `usual`: limits
  /// that the key does not set.
  std::optional<Caller> owner(const std::string& key, const Limits& usual = {}) const;
  /// Who granted this checkpoint with this key; nothing for any other key, as owner() says.
  std::optional<std::string> grantor(const std::string& key, const std::string& checkpoint) const;

 private:
  std::string make(const std::string& tenant, const std::string& scopes,
                   const std::map<std::string, std::int64_t>& limits, std::optional<double> expires,
                   const std::optional<std::string>& checkpoint);

  Database& database_;
};

}  // namespace heddle::serve
