#include "serve/store/keys.h"

#include <nlohmann/json.hpp>

#include "base/quote.h"
#include "base/random_hex.h"
#include "base/text.h"
#include "serve/store/data_directory.h"

namespace heddle::serve {
namespace {

constexpr std::size_t kPrefixLength = 12;  ///< "tml-" and 32 of 256 bits
/// Keys in force: the first value is the key's hash, the second the time.
constexpr const char* kInForce =
    " FROM key WHERE hash = ? AND revoked IS NULL AND (expires IS NULL OR expires > ?) AND ";

}  // namespace

std::string begin_of(const std::string& key) { return key.substr(0, kPrefixLength); }

std::string Keys::add(const std::string& tenant, const std::string& scopes,
                      const std::map<std::string, std::int64_t>& limits,
                      std::optional<double> expires) {
  if (!is_plain_name(tenant))
    throw_error<ConfigError>("tenant {}: expected 1 to 128 letters, digits, _ . -",
                             text::shown(tenant));
  for (const std::string& scope : text::split(scopes, ',')) {
    if (scope != "train" && scope != "sample" && scope != "admin" && scope != "read")
      throw_error<ConfigError>("scope '{}': expected train, sample, admin or read",
                               text::shown(scope));
  }
  return make(tenant, scopes, limits, expires, {});
}

std::string Keys::grant(const std::string& checkpoint, std::optional<double> expires) {
  Statement owner(database_, "SELECT tenant FROM checkpoint WHERE path = ?");
  if (!owner.bind(checkpoint).step())
    throw_error<ConfigError>("checkpoint {} is not known: expected tinker://RUN/weights/NAME",
                             text::shown(checkpoint, 200));
  return make(owner.text(0), "", {}, expires, checkpoint);
}

std::string Keys::make(const std::string& tenant, const std::string& scopes,
                       const std::map<std::string, std::int64_t>& limits,
                       std::optional<double> expires,
                       const std::optional<std::string>& checkpoint) {
  const std::string key = "tml-" + random_hex(32);
  Statement(database_,
            "INSERT INTO key(tenant, prefix, hash, scopes, created, limits, expires, checkpoint) "
            "VALUES (?, ?, ?, ?, ?, ?, ?, ?)")
      .bind(tenant)
      .bind(begin_of(key))
      .bind(sha256_hex(key))
      .bind(scopes)
      .bind(now_s())
      .bind(nlohmann::json(limits).dump())
      .bind(expires)
      .bind(checkpoint)
      .run();
  return key;
}

std::vector<Keys::Entry> Keys::list() const {
  std::vector<Entry> entries;
  Statement rows(database_,
                 "SELECT id, tenant, prefix, coalesce('reads ' || checkpoint, scopes), created, "
                 "revoked, limits, expires FROM key ORDER BY id");
  while (rows.step()) {
    Entry entry{rows.integer(0), rows.text(1), rows.text(2), rows.text(3),
                rows.real(4),    {},           {},           {}};
    if (!rows.is_null(7)) entry.expires = rows.real(7);
    if (!rows.is_null(5)) entry.revoked = rows.real(5);
    entry.limits = nlohmann::json::parse(rows.text(6)).get<std::map<std::string, std::int64_t>>();
    entries.push_back(entry);
  }
  return entries;
}

Keys::Entry Keys::revoke(const std::string& number_or_prefix) {
  const bool is_whole = number_or_prefix.size() > kPrefixLength;
  std::int64_t whole = -1;
  if (is_whole) {
    Statement row(database_, "SELECT id FROM key WHERE hash = ?");
    if (row.bind(sha256_hex(number_or_prefix)).step()) whole = row.integer(0);
  }
  std::vector<Entry> found;
  for (const Entry& entry : list()) {
    const bool is_named =
        std::to_string(entry.id) == number_or_prefix || entry.id == whole ||
        (number_or_prefix.size() > 4 && entry.prefix.starts_with(number_or_prefix));
    if (!entry.revoked && is_named) found.push_back(entry);
  }
  if (found.size() != 1)
    throw_error<ConfigError>(
        "{} keys in force have the number or prefix '{}{}': expected one; see "
        "heddle serve keys list",
        found.size(), text::shown(begin_of(number_or_prefix)), is_whole ? "..." : "");
  Statement(database_, "UPDATE key SET revoked = ? WHERE id = ?")
      .bind(now_s())
      .bind(found.front().id)
      .run();
  return found.front();
}

bool Keys::is_empty() const {
  return !Statement(database_, "SELECT 1 FROM key WHERE checkpoint IS NULL LIMIT 1").step();
}

std::optional<Caller> Keys::owner(const std::string& key, const Limits& usual) const {
  // The hash of a guess says nothing of the hashes that are near it, so a look-up leaks nothing.
  Statement row(database_,
                fmt::format("SELECT tenant, prefix, scopes, limits{}checkpoint IS NULL", kInForce));
  if (!row.bind(sha256_hex(key)).bind(now_s()).step()) return std::nullopt;
  Caller caller{row.text(0), row.text(1), {}, usual};
  const auto limits = nlohmann::json::parse(row.text(3));
  for (const LimitRow& limit : kLimitRows)
    caller.limits.*limit.member = limits.value(limit.name, usual.*limit.member);
  for (const std::string& scope : text::split(row.text(2), ',')) caller.scopes.insert(scope);
  return caller;
}

std::optional<std::string> Keys::grantor(const std::string& key,
                                         const std::string& checkpoint) const {
  Statement row(database_, fmt::format("SELECT tenant{}checkpoint = ?", kInForce));
  if (!row.bind(sha256_hex(key)).bind(now_s()).bind(checkpoint).step()) return std::nullopt;
  return row.text(0);
}

}  // namespace heddle::serve
