#pragma once

#include <cstddef>
#include <cstdint>
#include <filesystem>
#include <memory>
#include <string>
#include <utility>

namespace heddle::data {

/// Bytes of a file, decompressed on the way: gzip, zstd and xz are told by their first bytes, not
/// by the file's name.
class ByteSource {
 public:
  virtual ~ByteSource() = default;
  /// Up to `count` bytes; 0 at the end. Throws FileError, or DataError for a damaged or cut
  /// compressed stream.
  virtual std::size_t read(char* into, std::size_t count) = 0;
  /// Bytes of the file itself, before decompression, that were read so far.
  virtual std::uint64_t bytes_consumed() const = 0;
  /// "-" is standard input. Throws FileError, and DataError for files of other kinds (with the way
  /// to convert them).
  static std::unique_ptr<ByteSource> open(const std::filesystem::path& path);
  /// Looks at the first bytes of `raw` and decompresses it if need be; `name` is used in messages.
  static std::unique_ptr<ByteSource> decompress(std::unique_ptr<ByteSource> raw,
                                                const std::string& name);
  /// The first character that is no white space within the first bytes ('\0' if there is none), and
  /// the source from its beginning.
  static std::pair<char, std::unique_ptr<ByteSource>> peek_first(
      std::unique_ptr<ByteSource> source);
  /// The file's name in messages.
  static std::string name_of(const std::filesystem::path& path);

  static constexpr const char* kStandardInput = "-";
};

}  // namespace heddle::data
