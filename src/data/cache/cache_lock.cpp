#include "data/cache/cache_lock.h"

#include <errno.h>
#include <fcntl.h>
#include <string.h>
#include <sys/file.h>
#include <unistd.h>

#include <chrono>
#include <thread>

#include "base/errors.h"
#include "base/log.h"

namespace heddle::data {

CacheLock::CacheLock(const std::filesystem::path& path, double timeout_s) {
  descriptor_ = open(path.c_str(), O_RDWR | O_CREAT | O_CLOEXEC, 0644);
  if (descriptor_ < 0) {
    throw_error<FileError>("cannot open the lock {}: {}", path.string(), strerror(errno));
  }
  const auto start = std::chrono::steady_clock::now();
  bool was_told = false;
  while (flock(descriptor_, LOCK_EX | LOCK_NB) != 0) {
    const int error = errno;
    const double waited =
        std::chrono::duration<double>(std::chrono::steady_clock::now() - start).count();
    if ((error != EWOULDBLOCK && error != EINTR) || waited > timeout_s) {
      close(descriptor_);
      if (error == EWOULDBLOCK) {
        throw_error<FileError>(
            "waited {:.0f} s for another process that tokenises into {}; if none runs, remove it",
            waited, path.string());
      }
      throw_error<FileError>("cannot lock {}: {}; set data.cache_dir to a folder on a local disk",
                             path.string(), strerror(error));
    }
    if (waited > 2 && !was_told) {
      log::info("waiting for another process that tokenises into {}", path.string());
      was_told = true;
    }
    std::this_thread::sleep_for(std::chrono::milliseconds(50));
  }
}

CacheLock::~CacheLock() { close(descriptor_); }

}  // namespace heddle::data
