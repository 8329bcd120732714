#include "data/cache/cache_lock.h"

#include <algorithm>

#include "base/errors.h"
#include "base/log.h"

namespace heddle::data {
namespace {

// A wait that is longer is worth a word.
constexpr double kQuietSeconds = 2;

}  // namespace

CacheLock::CacheLock(const std::filesystem::path& path, double timeout_s) : lock_(path) {
  try {
    if (lock_.try_lock_for(std::min(kQuietSeconds, timeout_s))) return;
    if (timeout_s > kQuietSeconds) {
      log::info("waiting for another process that tokenises into {}", path.string());
      if (lock_.try_lock_for(timeout_s - kQuietSeconds)) return;
    }
  } catch (const FileError& error) {
    throw_error<FileError>("{}; set data.cache_dir to a folder on a local disk", error.what());
  }
  throw_error<FileError>(
      "waited {:.0f} s for another process that tokenises into {}; if none runs, remove it",
      timeout_s, path.string());
}

}  // namespace heddle::data
