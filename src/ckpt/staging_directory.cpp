#include "ckpt/staging_directory.h"

#include <errno.h>
#include <fcntl.h>
#include <stdio.h>
#include <string.h>
#include <sys/stat.h>
#include <unistd.h>

#include <system_error>
#include <utility>

#include "base/errors.h"
#include "base/log.h"
#include "base/output_file.h"
#include "base/text.h"

namespace heddle::ckpt {
namespace {

// Shows that a directory under a temporary name was made here and may be deleted. It stays until
// after the rename, and the directory that is replaced gets one before: at no instant does an
// interruption leave a temporary name without it.
constexpr const char* kMarker = ".heddle-staging";

bool is_missing_or_empty(const Path& path) {
  std::error_code error;
  if (!std::filesystem::exists(std::filesystem::symlink_status(path, error))) return true;
  return std::filesystem::is_directory(path, error) && std::filesystem::is_empty(path, error) &&
         !error;
}

[[noreturn]] void fail(const char* what, const Path& path, int code) {
  throw_error<FileError>("cannot {} {}: {}", what, path.string(), strerror(code));
}

void rename_path(const Path& from, const Path& to) {
  if (::rename(from.c_str(), to.c_str()) != 0) fail("rename to", to, errno);
}

bool is_staging(const Path& directory) {
  std::error_code error;
  return std::filesystem::is_regular_file(
      std::filesystem::symlink_status(directory / kMarker, error));
}

void make_marker(const Path& directory) {
  const Path marker = directory / kMarker;
  const int descriptor = ::open(marker.c_str(), O_WRONLY | O_CREAT | O_CLOEXEC | O_NOFOLLOW, 0666);
  if (descriptor < 0) fail("write", marker, errno);
  ::close(descriptor);
}

/// In one step where the system can: at no instant is there nothing under either name.
void exchange(const Path& a, const Path& b) {
  if (::renameat2(AT_FDCWD, a.c_str(), AT_FDCWD, b.c_str(), RENAME_EXCHANGE) == 0) return;
  if (errno != EINVAL && errno != ENOSYS) fail("exchange with", b, errno);
  // Some network file systems cannot.
  const Path aside = a.string() + ".replaced";
  rename_path(b, aside);
  rename_path(a, b);
  rename_path(aside, a);
}

Path parent_of(const Path& path) {
  const Path parent = path.parent_path();
  return parent.empty() ? Path(".") : parent;
}

}  // namespace

Path without_trailing_slash(Path path) { return path.has_filename() ? path : path.parent_path(); }

Path output_place(Path path) {
  return without_trailing_slash(files::link_target(without_trailing_slash(std::move(path))));
}

StagingDirectory::StagingDirectory(Path final, Path temporary)
    : final_(output_place(std::move(final))),
      temporary_(without_trailing_slash(std::move(temporary))) {
  std::error_code error;
  // A link is in the way also where it leads to an empty folder or to one of ours.
  if (std::filesystem::is_symlink(temporary_, error) ||
      (!is_missing_or_empty(temporary_) && !is_staging(temporary_))) {
    throw_error<FileError>("{} is in the way and was not made by an interrupted run: move it",
                           temporary_.string());
  }
  std::filesystem::remove_all(temporary_, error);
  if (error) fail("remove", temporary_, error.value());
  files::make_writable_directory(parent_of(temporary_));
  if (::mkdir(temporary_.c_str(), 0777) != 0) fail("make the folder", temporary_, errno);
  try {
    make_marker(temporary_);
  } catch (...) {
    std::filesystem::remove_all(temporary_, error);
    throw;
  }
}

StagingDirectory::~StagingDirectory() {
  if (committed_) return;
  std::error_code error;
  std::filesystem::remove_all(temporary_, error);
  if (error) log::warning("cannot remove {}: {}", temporary_.string(), error.message());
}

void StagingDirectory::commit() {
  files::sync_directory(temporary_);
  const bool is_replacing = !is_missing_or_empty(final_);
  if (is_replacing) {
    make_marker(final_);
    exchange(temporary_, final_);
  } else {
    rename_path(temporary_, final_);  // also over an empty directory
  }
  committed_ = true;
  files::sync_directory(parent_of(final_));
  if (::unlink((final_ / kMarker).c_str()) != 0) fail("remove", final_ / kMarker, errno);
  if (!is_replacing) return;
  std::error_code error;
  std::filesystem::remove_all(temporary_, error);
  if (error)
    log::warning("cannot remove the replaced {}: {}", temporary_.string(), error.message());
}

void check_output_directory(const Path& name, bool overwrite, const std::string& expected_file) {
  const Path path = output_place(name);
  if (is_missing_or_empty(path)) return;
  std::error_code error;
  if (!std::filesystem::is_directory(path, error)) {
    throw_error<ConfigError>("{} exists and is no folder", path.string());
  }
  if (!overwrite) {
    throw_error<ConfigError>("{} exists and is not empty: give another folder, or --overwrite",
                             path.string());
  }
  if (!std::filesystem::exists(path / expected_file, error)) {
    throw_error<ConfigError>(
        "{} is not overwritten: it holds no {}, so it is something else than what would replace it",
        path.string(), expected_file);
  }
}

void require_free_space(const Path& path, std::uint64_t bytes) {
  std::error_code error;
  const auto space = std::filesystem::space(parent_of(without_trailing_slash(path)), error);
  // A file system that cannot say is asked by writing to it.
  if (error || space.available == static_cast<std::uintmax_t>(-1) || space.available >= bytes)
    return;
  throw_error<FileError>("{} needs {}, and its disk has {} free", path.string(),
                         text::format_bytes(static_cast<double>(bytes)),
                         text::format_bytes(static_cast<double>(space.available)));
}

void remove_directory_whole(const Path& path, const Path& temporary) {
  rename_path(path, temporary);
  std::error_code error;
  std::filesystem::remove_all(temporary, error);
  if (error) fail("remove", temporary, error.value());
}

}  // namespace heddle::ckpt
