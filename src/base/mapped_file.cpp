#include <errno.h>
#include <fcntl.h>
#include <signal.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <unistd.h>

#include <array>
#include <atomic>

#include "base/errors.h"
#include "base/files.h"

namespace heddle::files {
namespace {

[[noreturn]] void fail(const char* what, const std::string& path) {
  throw_error<FileError>("cannot {} {}: {}", what, path, strerror(errno));
}

std::int64_t change_of(const struct stat& status) {
  return status.st_mtim.tv_sec * 1'000'000'000 + status.st_mtim.tv_nsec;
}

/// The maps of the process, for a signal handler: no lock may be taken there. A file beyond the
/// table's end is not named.
std::array<std::atomic<const MappedFile*>, 8192>& maps() {
  static std::array<std::atomic<const MappedFile*>, 8192> table{};
  return table;
}

}  // namespace

MappedFile::MappedFile(const Path& path, const Path& folder)
    : path_(path.string()), descriptor_(open_regular(path, folder)) {
  struct stat status {};
  if (fstat(descriptor_, &status) != 0) {
    close(descriptor_);
    fail("stat", path_);
  }
  changed_ns_ = change_of(status);
  size_ = static_cast<std::size_t>(status.st_size);
  if (size_ == 0) return;
  void* mapped = mmap(nullptr, size_, PROT_READ, MAP_PRIVATE, descriptor_, 0);
  if (mapped == MAP_FAILED) {
    close(descriptor_);
    fail("map", path_);
  }
  data_ = static_cast<const std::byte*>(mapped);
  remember();
}

MappedFile::~MappedFile() {
  if (data_ != nullptr) {
    forget();
    munmap(const_cast<std::byte*>(data_), size_);
  }
  close(descriptor_);
}

void MappedFile::drop(std::size_t offset, std::size_t count) const {
  const auto page = static_cast<std::size_t>(sysconf(_SC_PAGESIZE));
  const std::size_t begin = (offset + page - 1) / page * page;
  const std::size_t end = (offset + count) / page * page;
  if (end > begin) madvise(const_cast<std::byte*>(data_) + begin, end - begin, MADV_DONTNEED);
}

void MappedFile::require_unchanged() const {
  struct stat status {};
  if (fstat(descriptor_, &status) != 0) fail("stat", path_);
  if (change_of(status) == changed_ns_ && static_cast<std::size_t>(status.st_size) == size_) return;
  throw_error<UserError>(
      "{} was changed while it was in use: it had {} bytes and has {}; leave it alone until the "
      "command has ended, and begin again",
      path_, size_, status.st_size);
}

void MappedFile::remember() const {
  for (auto& slot : maps()) {
    const MappedFile* free = nullptr;
    if (slot.compare_exchange_strong(free, this)) return;
  }
}

void MappedFile::forget() const {
  for (auto& slot : maps()) {
    const MappedFile* mine = this;
    if (slot.compare_exchange_strong(mine, nullptr)) return;
  }
}

namespace {

void write_all(std::string_view text) {
  while (!text.empty()) {
    const ssize_t written = ::write(STDERR_FILENO, text.data(), text.size());
    if (written <= 0) return;
    text.remove_prefix(static_cast<std::size_t>(written));
  }
}

/// Only what a signal handler may do: no allocation, no lock, no destructor.
void end_at_cut_file(int signal, siginfo_t* info, void*) {
  const auto* at = static_cast<const std::byte*>(info->si_addr);
  for (const auto& slot : maps()) {
    const MappedFile* map = slot;
    if (map == nullptr || at < map->bytes().data() ||
        at >= map->bytes().data() + map->bytes().size())
      continue;
    write_all("error: ");
    write_all(map->path());
    write_all(" was cut, or its disk failed, while it was read; restore it and begin again\n");
    _exit(1);
  }
  ::signal(signal, SIG_DFL);  // not ours: the instruction is tried again, and the process ends
}

}  // namespace

void name_cut_files() {
  struct sigaction action {};
  action.sa_sigaction = end_at_cut_file;
  action.sa_flags = SA_SIGINFO;
  sigaction(SIGBUS, &action, nullptr);
}

}  // namespace heddle::files
