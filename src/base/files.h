#pragma once

#include <cstddef>
#include <cstdint>
#include <filesystem>
#include <span>
#include <string>
#include <string_view>

/// File access whose failures are errors with path and reason, and whose writes appear whole or not
/// at all.
namespace heddle::files {

using Path = std::filesystem::path;

/// The whole file. Throws FileError.
std::string read(const Path& path);

/// Writes to a temporary name beside `path`, fsyncs, renames over `path` and fsyncs the folder.
/// Throws FileError, and then removes the temporary file and leaves what stood at `path`.
void write_atomically(const Path& path, std::string_view bytes);

/// Makes the folder and its parents. Throws FileError when that fails or it cannot be written to.
void make_writable_directory(const Path& path);

/// Flushes a folder's entries to the disk, so that a rename inside survives a crash. Throws
/// FileError.
void sync_directory(const Path& path);

/// A file that is written in pieces and takes its final name only when commit() returns.
class AtomicFile {
 public:
  /// Opens `path` + ".tmp" for writing, truncating what an interrupted run left there. Throws
  /// FileError.
  explicit AtomicFile(Path path);
  /// Without a commit, removes the temporary file.
  ~AtomicFile();
  AtomicFile(const AtomicFile&) = delete;
  AtomicFile& operator=(const AtomicFile&) = delete;

  /// Throws FileError, for example when the disk is full.
  void write(const void* bytes, std::size_t count);
  void write(std::string_view bytes) { write(bytes.data(), bytes.size()); }
  /// fsync, close, rename to the final name, fsync of the folder. Throws FileError.
  void commit();
  std::uint64_t bytes_written() const { return bytes_written_; }

 private:
  Path path_;
  Path temporary_;
  int descriptor_ = -1;
  std::uint64_t bytes_written_ = 0;
};

/// A read-only memory map of a whole file.
class MappedFile {
 public:
  /// Throws FileError.
  explicit MappedFile(const Path& path);
  ~MappedFile();
  MappedFile(const MappedFile&) = delete;
  MappedFile& operator=(const MappedFile&) = delete;

  std::span<const std::byte> bytes() const { return {data_, size_}; }
  /// Tells the system that [offset, offset + count) will not be read again, so that its pages need
  /// not stay resident.
  void drop(std::size_t offset, std::size_t count) const;

 private:
  const std::byte* data_ = nullptr;
  std::size_t size_ = 0;
};

}  // namespace heddle::files
