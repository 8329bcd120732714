#pragma once

#include "ckpt/safetensors.h"

namespace heddle::ckpt {

/// A directory that is filled under a temporary name and takes its final name, whole, when commit()
/// returns.
class StagingDirectory {
 public:
  /// Makes `temporary`. What an interrupted run left there is removed, if a marker file shows that
  /// it is ours; otherwise throws FileError.
  StagingDirectory(Path final, Path temporary);
  /// Without a commit, removes the temporary directory.
  ~StagingDirectory();
  StagingDirectory(const StagingDirectory&) = delete;
  StagingDirectory& operator=(const StagingDirectory&) = delete;

  /// Where to write until commit().
  const Path& path() const { return temporary_; }
  /// Flushes the directory, exchanges it with what stands at the final name (or renames it there),
  /// flushes the parent and removes what was replaced. Throws FileError.
  void commit();

 private:
  Path final_;
  Path temporary_;
  bool committed_ = false;
};

/// "a/b/" -> "a/b": a name that other names can be made from.
Path without_trailing_slash(Path path);

/// Where a directory that the user names is written: at the end of a symbolic link, so that the
/// link stays.
Path output_place(Path path);

/// Throws ConfigError unless a directory may be written at output_place(path): it is absent or
/// empty, or `overwrite` is set and it holds `expected_file`, which shows that it is of the kind
/// that is to be written.
void check_output_directory(const Path& path, bool overwrite, const std::string& expected_file);

/// Throws FileError if the file system that `path` would be made on says that it has less than
/// `bytes` left.
void require_free_space(const Path& path, std::uint64_t bytes);

/// Renames `path` to `temporary` and removes that, so that an interruption leaves no half of it
/// under its own name. Throws FileError.
void remove_directory_whole(const Path& path, const Path& temporary);

}  // namespace heddle::ckpt
