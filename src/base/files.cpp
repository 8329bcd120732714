#include "base/files.h"

#include <errno.h>
#include <fcntl.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <unistd.h>

#include <utility>

#include "base/errors.h"

namespace heddle::files {
namespace {

[[noreturn]] void fail(const char* what, const Path& path) {
  throw_error<FileError>("cannot {} {}: {}", what, path.string(), strerror(errno));
}

class Descriptor {
 public:
  Descriptor(const Path& path, int flags) : value_(open(path.c_str(), flags | O_CLOEXEC)) {
    if (value_ < 0) fail("open", path);
  }
  ~Descriptor() { close(value_); }
  Descriptor(const Descriptor&) = delete;
  Descriptor& operator=(const Descriptor&) = delete;
  int get() const { return value_; }

 private:
  int value_;
};

}  // namespace

std::string read(const Path& path) {
  const Descriptor file(path, O_RDONLY);
  std::string bytes;
  char buffer[1 << 16];
  while (true) {
    const ssize_t count = ::read(file.get(), buffer, sizeof buffer);
    if (count < 0 && errno == EINTR) continue;
    if (count < 0) fail("read", path);
    if (count == 0) return bytes;
    bytes.append(buffer, static_cast<std::size_t>(count));
  }
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
  const Descriptor folder(path.empty() ? Path(".") : path, O_RDONLY | O_DIRECTORY);
  if (fsync(folder.get()) != 0) fail("fsync the folder", path);
}

AtomicFile::AtomicFile(Path path) : path_(std::move(path)), temporary_(path_.string() + ".tmp") {
  descriptor_ = open(temporary_.c_str(), O_WRONLY | O_CREAT | O_TRUNC | O_CLOEXEC, 0644);
  if (descriptor_ < 0) fail("write", temporary_);
}

AtomicFile::~AtomicFile() {
  if (descriptor_ < 0) return;
  close(descriptor_);
  unlink(temporary_.c_str());
}

void AtomicFile::write(const void* bytes, std::size_t count) {
  const char* next = static_cast<const char*>(bytes);
  bytes_written_ += count;
  while (count > 0) {
    const ssize_t written = ::write(descriptor_, next, count);
    if (written < 0 && errno == EINTR) continue;
    if (written < 0) fail("write", temporary_);
    next += written;
    count -= static_cast<std::size_t>(written);
  }
}

void AtomicFile::commit() {
  if (fsync(descriptor_) != 0) fail("fsync", temporary_);
  if (close(std::exchange(descriptor_, -1)) != 0) fail("close", temporary_);
  if (rename(temporary_.c_str(), path_.c_str()) != 0) fail("rename to", path_);
  sync_directory(path_.parent_path());
}

MappedFile::MappedFile(const Path& path) {
  const Descriptor file(path, O_RDONLY);
  struct stat status {};
  if (fstat(file.get(), &status) != 0) fail("stat", path);
  if (!S_ISREG(status.st_mode)) throw_error<FileError>("{} is not a regular file", path.string());
  size_ = static_cast<std::size_t>(status.st_size);
  if (size_ == 0) return;
  void* mapped = mmap(nullptr, size_, PROT_READ, MAP_PRIVATE, file.get(), 0);
  if (mapped == MAP_FAILED) fail("map", path);
  data_ = static_cast<const std::byte*>(mapped);
}

MappedFile::~MappedFile() {
  if (data_ != nullptr) munmap(const_cast<std::byte*>(data_), size_);
}

void MappedFile::drop(std::size_t offset, std::size_t count) const {
  const auto page = static_cast<std::size_t>(sysconf(_SC_PAGESIZE));
  const std::size_t begin = (offset + page - 1) / page * page;
  const std::size_t end = (offset + count) / page * page;
  if (end > begin) madvise(const_cast<std::byte*>(data_) + begin, end - begin, MADV_DONTNEED);
}

}  // namespace heddle::files
