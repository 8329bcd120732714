#pragma once

#include <filesystem>

#include "base/file_lock.h"

namespace heddle::train {

/// Keeps a second run out of train.output_dir while this object lives: both would write the same
/// checkpoints, metrics and final/. Of several ranks rank 0 has it for all. A killed process has it
/// no longer, and nothing need be removed; the file run.lock stays and says who was the last.
class RunLock {
 public:
  /// Makes the folder. Waits a moment for a run that is ending; throws ConfigError with the pid and
  /// host of a run that is not. Where the file system has no locks, warns and locks nothing. Throws
  /// ConfigError if the folder cannot be made or written to.
  explicit RunLock(const std::filesystem::path& output_directory);

 private:
  files::FileLock lock_;
};

}  // namespace heddle::train
