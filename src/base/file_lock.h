#pragma once

#include "base/files.h"

namespace heddle::files {

/// A file that one open of it may lock (flock): other processes, hosts of a shared file system, and
/// other FileLocks of this process wait. The system takes the lock from a process that dies,
/// however it dies, so that a file which is left behind keeps nobody out.
class FileLock {
 public:
  /// Opens the file, making it if there is none; takes nothing yet and follows no link. Throws
  /// FileError.
  explicit FileLock(Path path);
  ~FileLock();
  FileLock(const FileLock&) = delete;
  FileLock& operator=(const FileLock&) = delete;

  /// Takes the lock unless somebody has it; does not wait. Throws FileError with the system's
  /// reason where the file system has no locks.
  bool try_lock();
  /// Tries to lock again and again until `seconds` are over.
  bool try_lock_for(double seconds);

  /// The text that the holder wrote, empty if none. Throws FileError.
  std::string text() const;
  /// Replaces it, for those who find the lock taken. Throws FileError.
  void set_text(std::string_view text);

 private:
  Path path_;
  int descriptor_ = -1;
};

}  // namespace heddle::files
