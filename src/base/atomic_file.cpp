#include <dirent.h>
#include <errno.h>
#include <fcntl.h>
#include <string.h>
#include <sys/file.h>
#include <sys/stat.h>
#include <unistd.h>

#include <memory>
#include <random>
#include <utility>

#include "base/errors.h"
#include "base/files.h"

namespace heddle::files {
namespace {

constexpr std::string_view kMark = ".tmp-";
constexpr std::size_t kDigits = 16;
constexpr int kAttempts = 100;

[[noreturn]] void fail(const char* what, const Path& path, int code = errno) {
  throw_error<FileError>("cannot {} {}: {}", what, path.string(), strerror(code));
}

std::string random_digits() {
  std::random_device random;
  return fmt::format("{:08x}{:08x}", random(), random());
}

/// Removes what dead writers of `name` left in the folder. A living one holds the lock of its file.
void remove_stale(int folder, const std::string& name) {
  const int copy = openat(folder, ".", O_RDONLY | O_DIRECTORY | O_CLOEXEC);
  if (copy < 0) return;
  const std::unique_ptr<DIR, int (*)(DIR*)> entries(fdopendir(copy), closedir);
  if (!entries) {
    close(copy);
    return;
  }
  const std::string begin = name + std::string(kMark);
  while (const dirent* entry = readdir(entries.get())) {
    const std::string_view found = entry->d_name;
    const bool is_ours =
        found.size() == begin.size() + kDigits && found.starts_with(begin) &&
        found.find_first_not_of("0123456789abcdef", begin.size()) == std::string_view::npos;
    if (!is_ours) continue;
    const int left = openat(folder, entry->d_name, O_RDWR | O_CLOEXEC | O_NOFOLLOW | O_NONBLOCK);
    if (left < 0) continue;
    struct stat status {};
    const bool is_stale = fstat(left, &status) == 0 && S_ISREG(status.st_mode) &&
                          status.st_uid == geteuid() && flock(left, LOCK_EX | LOCK_NB) == 0;
    if (is_stale) unlinkat(folder, entry->d_name, 0);
    close(left);
  }
}

}  // namespace

AtomicFile::AtomicFile(Path path) : path_(std::move(path)) {
  const Path parent = path_.parent_path().empty() ? Path(".") : path_.parent_path();
  const std::string name = path_.filename().string();
  folder_ = open(parent.c_str(), O_RDONLY | O_DIRECTORY | O_CLOEXEC);
  if (folder_ < 0 && errno == ENOENT)
    throw_error<FileError>("cannot write {}: there is no folder {}; make it first", path_.string(),
                           parent.string());
  if (folder_ < 0) fail("write", path_);
  remove_stale(folder_, name);
  for (int attempt = 0; descriptor_ < 0 && attempt < kAttempts; ++attempt) {
    temporary_ = name + std::string(kMark) + random_digits();
    descriptor_ = openat(folder_, temporary_.c_str(),
                         O_WRONLY | O_CREAT | O_EXCL | O_NOFOLLOW | O_CLOEXEC, 0666);
    if (descriptor_ < 0 && errno != EEXIST) break;
  }
  if (descriptor_ < 0) {
    const int code = errno;
    close(folder_);
    fail("write", path_, code);
  }
  flock(descriptor_, LOCK_EX | LOCK_NB);  // where there are no locks, leftovers stay
}

AtomicFile::~AtomicFile() {
  if (descriptor_ >= 0) {
    unlinkat(folder_, temporary_.c_str(), 0);
    close(descriptor_);
  }
  if (folder_ >= 0) close(folder_);
}

void AtomicFile::write(const void* bytes, std::size_t count) {
  const char* next = static_cast<const char*>(bytes);
  bytes_written_ += count;
  while (count > 0) {
    const ssize_t written = ::write(descriptor_, next, count);
    if (written < 0 && errno == EINTR) continue;
    if (written < 0 && errno == EFAULT) {
      // The bytes come from a mapped file, the only memory that can go away.
      throw_error<FileError>("cannot write {}: the file that it is copied from was cut meanwhile",
                             path_.string());
    }
    if (written < 0) fail("write", path_);
    next += written;
    count -= static_cast<std::size_t>(written);
  }
}

void AtomicFile::commit() {
  if (fsync(descriptor_) != 0) fail("fsync", path_);
  if (renameat(folder_, temporary_.c_str(), folder_, path_.filename().c_str()) != 0)
    fail("rename to", path_);
  if (close(std::exchange(descriptor_, -1)) != 0) fail("close", path_);
  if (fsync(folder_) != 0) fail("fsync the folder of", path_);
}

}  // namespace heddle::files
