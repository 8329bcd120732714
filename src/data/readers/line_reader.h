#pragma once

#include <cstddef>
#include <cstdint>
#include <filesystem>
#include <memory>
#include <string>

#include "base/errors.h"

namespace heddle::data {

/// Bytes of a file, decompressed on the way: gzip and zstd are told by their first bytes, not by
/// the file's name.
class ByteSource {
 public:
  virtual ~ByteSource() = default;
  /// Up to `count` bytes; 0 at the end. Throws FileError, or DataError for a damaged or cut
  /// compressed stream.
  virtual std::size_t read(char* into, std::size_t count) = 0;
  /// Bytes of the file itself, before decompression, that were read so far.
  virtual std::uint64_t bytes_consumed() const = 0;
  /// Throws FileError, and DataError for Parquet and Arrow files (with the way to convert them).
  static std::unique_ptr<ByteSource> open(const std::filesystem::path& path);
  /// Looks at the first bytes of `raw` and decompresses it if need be; `name` is used in messages.
  static std::unique_ptr<ByteSource> decompress(std::unique_ptr<ByteSource> raw,
                                                const std::string& name);
};

/// A line beyond the limit: the reader can go on after it, which it cannot after other errors.
class LineTooLong : public DataError {
 public:
  using DataError::DataError;
};

/// Lines of a file without their ends (LF or CRLF) and without a byte order mark. Blank lines are
/// skipped and counted.
class LineReader {
 public:
  explicit LineReader(const std::filesystem::path& path,
                      std::size_t max_line_bytes = std::size_t{64} << 20);
  /// From any source; `name` is used in messages.
  LineReader(std::unique_ptr<ByteSource> source, std::string name, std::size_t max_line_bytes);

  /// False at the end. Throws LineTooLong, after which the next call continues behind that line.
  bool next(std::string& line);
  /// Number of the line that next() gave last, from 1.
  std::int64_t line() const { return line_; }
  std::int64_t blank_lines() const { return blank_lines_; }
  std::uint64_t bytes_consumed() const { return source_->bytes_consumed(); }
  const std::string& name() const { return name_; }

 private:
  bool fill();

  std::unique_ptr<ByteSource> source_;
  std::string name_;
  std::size_t max_line_bytes_;
  std::string buffer_;
  std::size_t position_ = 0;
  bool ended_ = false;
  std::int64_t line_ = 0;
  std::int64_t blank_lines_ = 0;
};

}  // namespace heddle::data
