#pragma once

#include <cstdint>
#include <filesystem>
#include <memory>
#include <string>

#include "base/errors.h"

namespace heddle::data {

/// A row that cannot be handed over, such as one beyond the limit: the reader can go on after it,
/// which it cannot after other errors.
class UnusableRow : public DataError {
 public:
  using DataError::DataError;
};

/// The rows of a file, each as JSON text.
class RecordReader {
 public:
  virtual ~RecordReader() = default;
  /// The reader for the file: Parquet and Arrow by the first bytes, CSV and TSV by the name's
  /// ending, plain text by .txt (one row of the whole file), a JSON list by its first character,
  /// JSON Lines otherwise.
  static std::unique_ptr<RecordReader> open(const std::filesystem::path& path,
                                            std::size_t max_bytes = std::size_t{64} << 20);

  /// Form that the name's ending gives a file: ".csv", ".tsv" or ".txt"; "": what lies in it does.
  static std::string form_of(const std::filesystem::path& path);

  /// False at the end. Throws UnusableRow, after which the next call continues after that row, and
  /// DataError for a file that cannot be read on.
  virtual bool next(std::string& json) = 0;
  /// Number of the line on which the row that next() gave last begins, from 1.
  virtual std::int64_t line() const = 0;
  virtual std::int64_t blank_lines() const = 0;
  virtual std::uint64_t bytes_consumed() const = 0;
  virtual const std::string& name() const = 0;
};

}  // namespace heddle::data
