#include "base/file_lock.h"

#include <errno.h>
#include <fcntl.h>
#include <string.h>
#include <sys/file.h>
#include <sys/stat.h>
#include <unistd.h>

#include <array>
#include <chrono>
#include <thread>
#include <utility>

#include "base/errors.h"

namespace heddle::files {

FileLock::FileLock(Path path) : path_(std::move(path)) {
  // For writing, because NFS locks a file exclusively only for those who may write it.
  descriptor_ =
      open(path_.c_str(), O_RDWR | O_CREAT | O_CLOEXEC | O_NOFOLLOW | O_NONBLOCK | O_NOCTTY, 0666);
  if (descriptor_ < 0) {
    throw_error<FileError>(
        "cannot open the lock {}: {}", path_.string(),
        errno == ELOOP ? "it is a link, which is not followed; remove it" : strerror(errno));
  }
  // The text written into the lock must not reach another file under this name.
  struct stat status {};
  if (fstat(descriptor_, &status) == 0 && S_ISREG(status.st_mode) && status.st_nlink <= 1) return;
  close(descriptor_);
  throw_error<FileError>("cannot open the lock {}: it is not a file of its own; remove it",
                         path_.string());
}

FileLock::~FileLock() { close(descriptor_); }

bool FileLock::try_lock() {
  while (flock(descriptor_, LOCK_EX | LOCK_NB) != 0) {
    if (errno == EINTR) continue;
    if (errno == EWOULDBLOCK) return false;
    throw_error<FileError>("cannot lock {}: {}", path_.string(), strerror(errno));
  }
  return true;
}

bool FileLock::try_lock_for(double seconds) {
  using Clock = std::chrono::steady_clock;
  const auto end = Clock::now() + std::chrono::duration<double>(seconds);
  while (!try_lock()) {
    if (Clock::now() >= end) return false;
    std::this_thread::sleep_for(std::chrono::milliseconds(50));
  }
  return true;
}

std::string FileLock::text() const {
  std::array<char, 4096> buffer;  // a line or two
  const ssize_t count = pread(descriptor_, buffer.data(), buffer.size(), 0);
  if (count < 0) throw_error<FileError>("cannot read {}: {}", path_.string(), strerror(errno));
  return {buffer.data(), static_cast<std::size_t>(count)};
}

void FileLock::set_text(std::string_view text) {
  // In place: under another name it would be another file, which nobody has locked.
  if (ftruncate(descriptor_, 0) != 0 ||
      pwrite(descriptor_, text.data(), text.size(), 0) != static_cast<ssize_t>(text.size()))
    throw_error<FileError>("cannot write {}: {}", path_.string(), strerror(errno));
}

}  // namespace heddle::files
