#pragma once

#include <cstdint>
#include <filesystem>
#include <memory>
#include <string>

#include "data/readers/byte_source.h"
#include "data/readers/record_reader.h"

namespace heddle::data {

/// Lines of a file without their ends (LF or CRLF) and without a byte order mark. Blank lines are
/// skipped and counted.
class LineReader : public RecordReader {
 public:
  explicit LineReader(const std::filesystem::path& path,
                      std::size_t max_line_bytes = std::size_t{64} << 20);
  /// From any source; `name` is used in messages.
  LineReader(std::unique_ptr<ByteSource> source, std::string name, std::size_t max_line_bytes);

  bool next(std::string& line) override;
  std::int64_t line() const override { return line_; }
  std::int64_t blank_lines() const override { return blank_lines_; }
  std::uint64_t bytes_consumed() const override { return source_->bytes_consumed(); }
  const std::string& name() const override { return name_; }

 private:
  bool fill();
  /// To the start of the next line, or the end of the file.
  void skip_line();
  [[noreturn]] void refuse_long_line() const;

  std::unique_ptr<ByteSource> source_;
  std::string name_;
  std::size_t max_line_bytes_;
  std::string buffer_;
  std::size_t position_ = 0;
  bool ended_ = false, is_in_long_line_ = false;
  std::int64_t line_ = 0;
  std::int64_t blank_lines_ = 0;
};

}  // namespace heddle::data
