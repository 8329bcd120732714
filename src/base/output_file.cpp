#include "base/output_file.h"

#include <errno.h>
#include <fcntl.h>
#include <string.h>
#include <sys/stat.h>
#include <unistd.h>

#include <system_error>
#include <utility>

#include "base/errors.h"
#include "base/terminal_text.h"

namespace heddle::files {
namespace {

[[noreturn]] void fail(const char* what, const Path& path) {
  throw_error<FileError>("cannot {} {}: {}", what, path.string(), strerror(errno));
}

/// A name of something that is open already, or that a driver stands for: never replaced, also
/// where it leads to a plain file.
bool is_system_name(const Path& path) {
  const std::string text = path.lexically_normal().string();
  return text.starts_with("/dev/") || text.starts_with("/proc/");
}

}  // namespace

Path link_target(const Path& path) {
  constexpr int kMostLinks = 40;  // as the system follows
  Path target = path;
  std::error_code error;
  for (int i = 0; i < kMostLinks && std::filesystem::is_symlink(target, error); ++i) {
    if (is_system_name(target)) return target;
    const Path next = std::filesystem::read_symlink(target, error);
    if (error) return target;
    target = next.is_absolute() ? next : target.parent_path() / next;
  }
  return target;
}

bool is_standard_output(const Path& path) {
  const std::string target = link_target(path).lexically_normal().string();
  return target == "-" || target == "/dev/stdout" || target == "/dev/fd/1" ||
         target == "/proc/self/fd/1";
}

OutputFile::OutputFile(const Path& path) : path_(link_target(path)) {
  if (path == "-") {
    stream_ = ::dup(STDOUT_FILENO);
    if (stream_ < 0) fail("write to", "the standard output");
    is_terminal_ = isatty(stream_) == 1;
    return;
  }
  struct stat status {};
  const bool exists = ::stat(path_.c_str(), &status) == 0;
  if (exists && S_ISDIR(status.st_mode))
    throw_error<FileError>("cannot write {}: it is a folder", path.string());
  if (!is_system_name(path_) && (!exists || S_ISREG(status.st_mode))) {
    file_ = std::make_unique<AtomicFile>(path_);
    return;
  }
  // Appended to where it leads to a file that is open already: what is in it is not ours.
  stream_ = ::open(path_.c_str(), O_WRONLY | O_APPEND | O_CLOEXEC);
  if (stream_ < 0) fail("write to", path_);
  is_terminal_ = isatty(stream_) == 1;
}

OutputFile::~OutputFile() {
  if (stream_ >= 0) ::close(stream_);
}

void OutputFile::write(std::string_view bytes) {
  if (file_) return file_->write(bytes);
  std::string shown;
  if (is_terminal_) bytes = shown = text::shown_lines(bytes);
  while (!bytes.empty()) {
    const ssize_t written = ::write(stream_, bytes.data(), bytes.size());
    if (written < 0 && errno == EINTR) continue;
    if (written < 0) fail("write to", path_);
    bytes.remove_prefix(static_cast<std::size_t>(written));
  }
}

void OutputFile::commit() {
  if (file_) return file_->commit();
  const int stream = std::exchange(stream_, -1);
  if (::close(stream) != 0) fail("write to", path_);
}

}  // namespace heddle::files
