#pragma once

#include <filesystem>

#include "base/file_lock.h"

namespace heddle::data {

/// An exclusive lock on a file, so that of several ranks on a host one tokenises and the others
/// wait for its result. The system takes the lock from a process that dies.
class CacheLock {
 public:
  /// Waits for the lock, at most `timeout_s`. Throws FileError that names the file when the time is
  /// over or the file system has no locks.
  CacheLock(const std::filesystem::path& path, double timeout_s);

 private:
  files::FileLock lock_;
};

}  // namespace heddle::data
