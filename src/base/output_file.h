#pragma once

#include <memory>
#include <string_view>

#include "base/files.h"

namespace heddle::files {

/// A file that the user names for a command's results. A plain file, also at the end of a symbolic
/// link, appears whole when commit() returns; a pipe, a device or "-" (the standard output) is
/// written to as the rows come. A terminal gets them without what it would obey (terminal_text.h).
class OutputFile {
 public:
  /// Throws FileError.
  explicit OutputFile(const Path& path);
  ~OutputFile();
  OutputFile(const OutputFile&) = delete;
  OutputFile& operator=(const OutputFile&) = delete;

  /// Throws FileError, for example when the disk is full or nobody reads the pipe.
  void write(std::string_view bytes);
  void commit();

 private:
  Path path_;
  std::unique_ptr<AtomicFile> file_;  ///< null: a stream
  int stream_ = -1;
  bool is_terminal_ = false;
};

/// "-", or a name of the standard output such as /dev/stdout: results go there, and what a command
/// says besides must not.
bool is_standard_output(const Path& path);

/// Where a symbolic link leads, also if nothing stands there; other paths as they are.
Path link_target(const Path& path);

}  // namespace heddle::files
