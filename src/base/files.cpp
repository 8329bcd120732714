#include "base/files.h"

#include <errno.h>
#include <fcntl.h>
#include <limits.h>
#include <string.h>
#include <sys/stat.h>
#include <unistd.h>

#include <algorithm>
#include <array>
#include <atomic>
#include <utility>

#include "base/errors.h"
#include "base/hugging_face_cache.h"
#include "base/quote.h"
#include "base/text.h"

namespace heddle::files {
namespace {

[[noreturn]] void fail(const char* what, const Path& path) {
  throw_error<FileError>("cannot {} {}: {}", what, path.string(), strerror(errno));
}

class Descriptor {
 public:
  explicit Descriptor(int value) : value_(value) {}
  ~Descriptor() {
    if (value_ >= 0) close(value_);
  }
  Descriptor(const Descriptor&) = delete;
  Descriptor& operator=(const Descriptor&) = delete;
  int get() const { return value_; }
  int release() { return std::exchange(value_, -1); }

 private:
  int value_;
};

/// A setting of the process, like the level of its log.
std::atomic<std::uint64_t>& limit_factor() {
  static std::atomic<std::uint64_t> factor{1};
  return factor;
}

void require_size(const Path& path, std::uint64_t bytes, const Limit& limit) {
  const std::uint64_t factor = limit_factor();
  if (bytes / factor <= limit.bytes) return;
  const auto size = [](std::uint64_t n) { return text::format_bytes(static_cast<double>(n)); };
  throw_error<UserError>(
      "{} has {}: {} may have {}; if it is what you mean to read, `heddle --file-limits {} ...` "
      "allows {} times as much",
      path.string(), size(bytes), limit.kind, size(limit.bytes * factor), bytes / limit.bytes + 1,
      bytes / limit.bytes + 1);
}

const char* kind_of(mode_t mode) {
  if (S_ISDIR(mode)) return "a folder";
  if (S_ISFIFO(mode)) return "a pipe";
  if (S_ISSOCK(mode)) return "a socket";
  return "a device";
}

void require_regular(const Path& path, mode_t mode) {
  if (S_ISREG(mode)) return;
  throw_error<UserError>("{} is {}, expected a regular file", path.string(), kind_of(mode));
}

bool is_inside(const Path& path, const Path& folder) {
  const auto [end, unused] = std::mismatch(folder.begin(), folder.end(), path.begin(), path.end());
  return end == folder.end();
}

/// ".../models--x--y" of a folder ".../models--x--y/snapshots/<revision>" or one in it; "" for
/// others.
Path repository_of(const Path& folder) {
  for (Path at = folder; at.has_relative_path(); at = at.parent_path()) {
    const Path repository = at.parent_path().parent_path();
    const std::string name = repository.filename().string();
    if (at.parent_path().filename() == "snapshots" &&
        (name.starts_with("models--") || name.starts_with("datasets--"))) {
      return repository;
    }
  }
  return {};
}

/// True where files of `repository` may be links to `real`: into blobs/ beside its snapshots, and
/// from the user's own cache anywhere, as he laid it out.
bool may_leave(const Path& repository, const Path& real) {
  if (repository.empty()) return false;
  std::error_code ignored;
  const Path own = std::filesystem::canonical(hugging_face_cache(), ignored);
  const Path blobs = std::filesystem::canonical(repository / "blobs", ignored);
  return (!own.empty() && repository.parent_path() == own) ||
         (!blobs.empty() && is_inside(real, blobs));
}

/// Asks the system where the opened file really lies, so that nobody can change a link between the
/// question and the opening.
void require_inside(const Path& path, int descriptor, const Path& folder) {
  std::error_code error;
  std::string opened(PATH_MAX, '\0');
  const std::string link = "/proc/self/fd/" + std::to_string(descriptor);
  const ssize_t length = readlink(link.c_str(), opened.data(), opened.size());
  opened.resize(static_cast<std::size_t>(std::max<ssize_t>(length, 0)));
  const Path real = length > 0 ? Path(opened) : std::filesystem::canonical(path, error);
  const Path inside = std::filesystem::canonical(folder, error);
  if (error) throw_error<FileError>("cannot find {}: {}", path.string(), error.message());
  const Path repository = repository_of(inside);
  if (is_inside(real, inside) || may_leave(repository, real)) return;
  throw_error<UserError>(
      "{} is a link to {}, outside its folder: links that lead out of a model's folder are not "
      "followed; put the file itself there{}",
      path.string(), text::shown(real.string()),
      repository.empty() ? ""
                         : fmt::format(", or if {0} is your own cache, whose links are followed, "
                                       "set HF_HUB_CACHE={0}",
                                       text::shown(repository.parent_path().string())));
}

}  // namespace

void multiply_limits(std::uint64_t factor) { limit_factor() = std::max<std::uint64_t>(1, factor); }

int open_regular(const Path& path, const Path& folder) {
  struct stat status {};
  // Asked before as well, because opening a device can already do something.
  if (stat(path.c_str(), &status) != 0) fail("open", path);
  require_regular(path, status.st_mode);
  Descriptor file(open(path.c_str(), O_RDONLY | O_CLOEXEC | O_NONBLOCK | O_NOCTTY));
  if (file.get() < 0) fail("open", path);
  if (fstat(file.get(), &status) != 0) fail("stat", path);
  require_regular(path, status.st_mode);
  if (!folder.empty()) require_inside(path, file.get(), folder);
  return file.release();
}

std::string read(const Path& path, const Limit& limit, const Path& folder) {
  const Descriptor file(open_regular(path, folder));
  struct stat status {};
  if (fstat(file.get(), &status) != 0) fail("stat", path);
  require_size(path, static_cast<std::uint64_t>(status.st_size), limit);
  std::string bytes;
  bytes.reserve(static_cast<std::size_t>(status.st_size));
  std::array<char, 1 << 16> buffer;
  while (true) {
    const ssize_t count = ::read(file.get(), buffer.data(), buffer.size());
    if (count < 0 && errno == EINTR) continue;
    if (count < 0) fail("read", path);
    if (count == 0) return bytes;
    bytes.append(buffer.data(), static_cast<std::size_t>(count));
    require_size(path, bytes.size(), limit);  // it may grow
  }
}

int open_to_append(const Path& path) {
  Descriptor file(
      open(path.c_str(),
           O_WRONLY | O_CREAT | O_APPEND | O_CLOEXEC | O_NOFOLLOW | O_NONBLOCK | O_NOCTTY, 0666));
  if (file.get() < 0 && errno == ELOOP) {
    throw_error<FileError>("cannot write {}: it is a link, which is not followed; remove it",
                           path.string());
  }
  if (file.get() < 0) fail("write", path);
  struct stat status {};
  if (fstat(file.get(), &status) != 0) fail("stat", path);
  if (!S_ISREG(status.st_mode)) {
    throw_error<FileError>("cannot write {}: it is {}, expected a regular file", path.string(),
                           kind_of(status.st_mode));
  }
  return file.release();
}

void write_atomically(const Path& path, std::string_view bytes) {
  AtomicFile file(path);
  file.write(bytes);
  file.commit();
}

void make_writable_directory(const Path& path) {
  std::error_code error;
  std::filesystem::create_directories(path, error);
  if (error)
    throw_error<FileError>("cannot make the folder {}: {}", path.string(), error.message());
  if (access(path.c_str(), W_OK | X_OK) != 0) fail("write to the folder", path);
}

void sync_directory(const Path& path) {
  const Path name = path.empty() ? Path(".") : path;
  const Descriptor folder(open(name.c_str(), O_RDONLY | O_DIRECTORY | O_CLOEXEC));
  if (folder.get() < 0) fail("open", name);
  if (fsync(folder.get()) != 0) fail("fsync the folder", path);
}

}  // namespace heddle::files
