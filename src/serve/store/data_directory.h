#pragma once

#include <filesystem>
#include <memory>
#include <string>

#include "base/file_lock.h"
#include "serve/store/database.h"

namespace heddle::serve {

/// The folder of a server: its database, and one tree of checkpoints for each tenant,
/// tenants/NAME/runs/RUN/KIND/NAME. All of it belongs to the user alone (0700, 0600).
class DataDirectory {
 public:
  /// Makes the folder unless it stands. Throws ConfigError for one of another version.
  explicit DataDirectory(const std::filesystem::path& path);

  /// Keeps other servers out while this object lives. Throws ConfigError if one runs.
  void lock();
  Database& database() { return *database_; }
  const std::filesystem::path& path() const { return path_; }

  /// The folder of a tenant's run, made with what leads to it; no part of it is a link. Throws
  /// FileError.
  std::filesystem::path run_directory(const std::string& tenant, const std::string& run) const;

 private:
  std::filesystem::path path_;
  std::unique_ptr<Database> database_;
  std::unique_ptr<files::FileLock> lock_;
};

/// Names of tenants, checkpoints and adapters: [A-Za-z0-9_.-]{1,128}, not beginning with a dot.
bool is_plain_name(const std::string& name);

/// Seconds since 1970.
double now_s();
/// "2026-11-25T16:00:00.123Z"
std::string as_utc(double seconds);
/// Begin of a day (UTC) written as 2026-11-28. Throws HttpError 422.
double start_of_day(const std::string& day);
/// SHA-256 as hexadecimal digits.
std::string sha256_hex(const std::string& text);
/// HMAC with SHA-256.
std::string signature_hex(const std::string& key, const std::string& text);
/// Takes as long wherever they differ.
bool is_same_secret(const std::string& a, const std::string& b);

}  // namespace heddle::serve
