#pragma once

#include <cstddef>
#include <cstdint>
#include <filesystem>
#include <span>
#include <string>
#include <string_view>

/// File access whose failures are errors with path and reason, and whose writes appear whole or not
/// at all. Files may come from strangers: what is read is a regular file of a bounded size, and
/// what is written never goes through a link that somebody put there.
namespace heddle::files {

using Path = std::filesystem::path;

/// Bytes that a file of a kind may have: far above any honest one, so that no other fills the
/// memory.
struct Limit {
  const char* kind;
  std::uint64_t bytes;
};
inline constexpr Limit kJsonLimit{"a JSON file of a model", std::uint64_t{64} << 20};
inline constexpr Limit kTokenizerLimit{"a tokenizer file", std::uint64_t{256} << 20};
inline constexpr Limit kTemplateLimit{"a chat template", std::uint64_t{1} << 20};
inline constexpr Limit kYamlLimit{"a YAML file", std::uint64_t{1} << 20};
inline constexpr Limit kTextLimit{"a file that is read at once", std::uint64_t{2} << 30};

/// Multiplies every limit of this process: `heddle --file-limits N`.
void multiply_limits(std::uint64_t factor);

/// Opens a regular file for reading; the caller closes the descriptor. Anything else (a folder, a
/// pipe, a device, a socket) is refused at once and never waited for. With a `folder` the file must
/// lie inside it, also where its name is a link; links of a Hugging Face cache may lead to its own
/// blobs. Throws FileError if it cannot be opened, and UserError if it is refused.
int open_regular(const Path& path, const Path& folder = {});

/// The whole file. Throws as open_regular(), and UserError if it is larger than the limit.
std::string read(const Path& path, const Limit& limit = kTextLimit, const Path& folder = {});

/// Opens a regular file to append to, made if there is none, and follows no link. The caller closes
/// the descriptor. Throws FileError.
int open_to_append(const Path& path);

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
  /// Makes a new file `path` + ".tmp-<random digits>", whose name nobody can have taken before, and
  /// removes those that dead processes left. Throws FileError.
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
  std::string temporary_;  ///< in the folder that `folder_` holds open
  int folder_ = -1;
  int descriptor_ = -1;
  std::uint64_t bytes_written_ = 0;
};

/// A read-only memory map of a whole file.
class MappedFile {
 public:
  /// Throws as open_regular().
  explicit MappedFile(const Path& path, const Path& folder = {});
  ~MappedFile();
  MappedFile(const MappedFile&) = delete;
  MappedFile& operator=(const MappedFile&) = delete;

  std::span<const std::byte> bytes() const { return {data_, size_}; }
  const std::string& path() const { return path_; }
  /// Tells the system that [offset, offset + count) will not be read again, so that its pages need
  /// not stay resident.
  void drop(std::size_t offset, std::size_t count) const;
  /// Throws UserError if the file was written to or cut since it was opened: what was read may be a
  /// mixture.
  void require_unchanged() const;

 private:
  void remember() const;
  void forget() const;

  std::string path_;
  int descriptor_ = -1;
  const std::byte* data_ = nullptr;
  std::size_t size_ = 0;
  std::int64_t changed_ns_ = 0;
};

/// From here on a read of a mapped file that was cut meanwhile, which the system answers with
/// SIGBUS, ends the process with one line that names the file and with status 1.
void name_cut_files();

}  // namespace heddle::files
