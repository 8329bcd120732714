#include "serve/store/data_directory.h"

#include <fcntl.h>
#include <fmt/chrono.h>
#include <openssl/crypto.h>
#include <openssl/hmac.h>
#include <openssl/sha.h>
#include <sys/stat.h>
#include <unistd.h>

#include <algorithm>
#include <array>
#include <cerrno>
#include <chrono>
#include <cstdio>
#include <cstring>

#include "base/errors.h"
#include "base/quote.h"
#include "serve/http/request.h"

namespace heddle::serve {
namespace {

constexpr std::int64_t kVersion = 1;  ///< For tables and folders.
constexpr std::size_t kLongestName = 128;

/// SQLite takes request_place for statements that say `seq >= 0` in these words alone.
constexpr const char* kTables = R"(
CREATE TABLE IF NOT EXISTS meta(version INTEGER NOT NULL);
CREATE TABLE IF NOT EXISTS key(
  id INTEGER PRIMARY KEY, tenant TEXT NOT NULL, prefix TEXT NOT NULL, hash TEXT NOT NULL UNIQUE,
  scopes TEXT NOT NULL, created REAL NOT NULL, revoked REAL, limits TEXT NOT NULL DEFAULT '{}',
  expires REAL, checkpoint TEXT);
CREATE TABLE IF NOT EXISTS session(
  id TEXT PRIMARY KEY, tenant TEXT NOT NULL, created REAL NOT NULL, last_beat REAL NOT NULL,
  finished TEXT, display_name TEXT, metadata TEXT NOT NULL);
CREATE TABLE IF NOT EXISTS run(
  id TEXT PRIMARY KEY, session TEXT NOT NULL, tenant TEXT NOT NULL, created REAL NOT NULL,
  last_request REAL NOT NULL, options TEXT NOT NULL, metadata TEXT,
  is_live INTEGER NOT NULL, durable_seq INTEGER NOT NULL DEFAULT 0,
  durable_name TEXT, steps INTEGER NOT NULL DEFAULT 0);
CREATE TABLE IF NOT EXISTS sampler(
  id TEXT PRIMARY KEY, session TEXT NOT NULL, tenant TEXT NOT NULL, created REAL NOT NULL,
  model_path TEXT, clones INTEGER NOT NULL DEFAULT 0);
CREATE TABLE IF NOT EXISTS checkpoint(
  path TEXT PRIMARY KEY, run TEXT NOT NULL, tenant TEXT NOT NULL, kind TEXT NOT NULL,
  name TEXT NOT NULL, created REAL NOT NULL, bytes INTEGER NOT NULL, is_public INTEGER NOT NULL,
  expires REAL, metadata TEXT, options TEXT NOT NULL, folder TEXT NOT NULL);
CREATE INDEX IF NOT EXISTS checkpoint_run ON checkpoint(run);
CREATE TABLE IF NOT EXISTS request(
  id TEXT PRIMARY KEY, tenant TEXT NOT NULL, owner TEXT NOT NULL, seq INTEGER NOT NULL,
  kind TEXT NOT NULL, hash TEXT NOT NULL, state INTEGER NOT NULL, promise TEXT NOT NULL,
  is_proto INTEGER NOT NULL DEFAULT 0, result BLOB, body BLOB, created REAL NOT NULL,
  finished REAL);
CREATE UNIQUE INDEX IF NOT EXISTS request_place ON request(owner, seq) WHERE seq >= 0;
CREATE INDEX IF NOT EXISTS request_finished ON request(finished) WHERE finished IS NOT NULL;
CREATE TABLE IF NOT EXISTS refused(
  run TEXT NOT NULL, seq INTEGER NOT NULL, PRIMARY KEY(run, seq)) WITHOUT ROWID;
CREATE INDEX IF NOT EXISTS run_session ON run(session);
CREATE TABLE IF NOT EXISTS usage(
  day TEXT NOT NULL, tenant TEXT NOT NULL, requests INTEGER NOT NULL, refused INTEGER NOT NULL,
  trained INTEGER NOT NULL, read INTEGER NOT NULL, generated INTEGER NOT NULL,
  PRIMARY KEY(day, tenant)) WITHOUT ROWID;
CREATE TABLE IF NOT EXISTS audit(
  id INTEGER PRIMARY KEY, time REAL NOT NULL, tenant TEXT NOT NULL, key_prefix TEXT NOT NULL,
  event TEXT NOT NULL, object TEXT NOT NULL);
CREATE INDEX IF NOT EXISTS audit_time ON audit(time);
)";

using Digest = std::array<unsigned char, SHA256_DIGEST_LENGTH>;

const unsigned char* bytes_of(const std::string& text) {
  return reinterpret_cast<const unsigned char*>(text.data());
}

std::string hex(const Digest& digest) {
  std::string out;
  for (const unsigned char byte : digest) out += fmt::format("{:02x}", byte);
  return out;
}

/// A folder below an open one, made if it is missing and never a link. Closes `parent`.
int opened_folder(int parent, const std::string& name, const std::filesystem::path& shown) {
  if (mkdirat(parent, name.c_str(), 0700) != 0 && errno != EEXIST) {
    const int reason = errno;
    close(parent);
    throw_error<FileError>("{}: {}", (shown / name).string(), std::strerror(reason));
  }
  const int folder = openat(parent, name.c_str(), O_RDONLY | O_DIRECTORY | O_NOFOLLOW | O_CLOEXEC);
  const int reason = errno;
  close(parent);
  if (folder < 0) throw_error<FileError>("{}: {}", (shown / name).string(), std::strerror(reason));
  return folder;
}

}  // namespace

DataDirectory::DataDirectory(const std::filesystem::path& path) : path_(path) {
  try {
    files::make_writable_directory(path_);
  } catch (const FileError& error) {
    throw_error<ConfigError>("--data-dir: {}", error.what());
  }
  if (chmod(path_.c_str(), 0700) != 0)
    throw_error<FileError>("{}: {}", path_.string(), std::strerror(errno));
  database_ = std::make_unique<Database>(path_ / "server.sqlite");
  database_->execute(kTables);
  // Keys of the first programs of this version had neither limits nor an end, and granted nothing.
  const auto add_to_keys = [this](const char* column, const char* type) {
    if (!Statement(*database_, "SELECT 1 FROM pragma_table_info('key') WHERE name = ?")
             .bind(std::string_view(column))
             .step())
      database_->execute(fmt::format("ALTER TABLE key ADD COLUMN {} {}", column, type).c_str());
  };
  add_to_keys("limits", "TEXT NOT NULL DEFAULT '{}'");
  add_to_keys("expires", "REAL");
  add_to_keys("checkpoint", "TEXT");
  Statement version(*database_, "SELECT version FROM meta");
  if (!version.step()) {
    Statement(*database_, "INSERT INTO meta VALUES (?)").bind(kVersion).run();
  } else if (version.integer(0) != kVersion) {
    throw_error<ConfigError>(
        "{}: this data directory has version {}, this program knows {}: use the program that made "
        "it, or another --data-dir",
        path_.string(), version.integer(0), kVersion);
  }
}

void DataDirectory::lock() {
  lock_ = std::make_unique<files::FileLock>(path_ / "lock");
  if (!lock_->try_lock())
    throw_error<ConfigError>(
        "{}: a server runs on this data directory ({}); give another --data-dir", path_.string(),
        lock_->text());
  lock_->set_text(fmt::format("process {}", getpid()));
}

std::filesystem::path DataDirectory::run_directory(const std::string& tenant,
                                                   const std::string& run) const {
  std::filesystem::path shown = path_;
  int folder = open(path_.c_str(), O_RDONLY | O_DIRECTORY | O_CLOEXEC);
  if (folder < 0) throw_error<FileError>("{}: {}", path_.string(), std::strerror(errno));
  for (const std::string& name : {std::string("tenants"), tenant, std::string("runs"), run}) {
    folder = opened_folder(folder, name, shown);
    shown /= name;
  }
  close(folder);
  return shown;
}

bool is_plain_name(const std::string& name) {
  return !name.empty() && name.size() <= kLongestName && name.front() != '.' &&
         std::ranges::all_of(name, [](unsigned char c) {
           return std::isalnum(c) || c == '_' || c == '.' || c == '-';
         });
}

double now_s() {
  return std::chrono::duration<double>(std::chrono::system_clock::now().time_since_epoch()).count();
}

std::string as_utc(double seconds) {
  const auto whole = static_cast<std::time_t>(seconds);
  return fmt::format("{:%Y-%m-%dT%H:%M:%S}.{:03}Z", fmt::gmtime(whole),
                     static_cast<int>((seconds - static_cast<double>(whole)) * 1000));
}

double start_of_day(const std::string& day) {
  int year = 0, month = 0, number = 0, read = 0;
  const bool is_read =
      std::sscanf(day.c_str(), "%4d-%2d-%2d%n", &year, &month, &number, &read) == 3;
  const std::chrono::year_month_day date{std::chrono::year(year),
                                         std::chrono::month(static_cast<unsigned>(month)),
                                         std::chrono::day(static_cast<unsigned>(number))};
  if (!is_read || static_cast<std::size_t>(read) != day.size() || !date.ok())
    throw_http(422, "day {}: expected a date such as 2026-11-28", text::shown(day, 40));
  return std::chrono::duration<double>(std::chrono::sys_days(date).time_since_epoch()).count();
}

std::string sha256_hex(const std::string& text) {
  Digest digest;
  SHA256(bytes_of(text), text.size(), digest.data());
  return hex(digest);
}

std::string signature_hex(const std::string& key, const std::string& text) {
  Digest digest;
  if (HMAC(EVP_sha256(), key.data(), static_cast<int>(key.size()), bytes_of(text), text.size(),
           digest.data(), nullptr) == nullptr)
    throw InternalError("HMAC() fails");
  return hex(digest);
}

bool is_same_secret(const std::string& a, const std::string& b) {
  return a.size() == b.size() && CRYPTO_memcmp(a.data(), b.data(), a.size()) == 0;
}

}  // namespace heddle::serve
