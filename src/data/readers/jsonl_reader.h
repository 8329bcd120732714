#pragma once

#include <cstdint>
#include <filesystem>
#include <map>
#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "data/readers/line_reader.h"
#include "data/readers/row.h"

namespace heddle::data {

struct ReaderOptions : RowOptions {
  std::size_t max_line_bytes = std::size_t{64} << 20;
  int max_depth = 100;  ///< nesting of lists and objects
};

/// "data.jsonl:12"
struct Place {
  std::string file;
  std::int64_t line = 0;
};

/// Parses one line. Throws DataError "file:line: field ...: reason".
Row parse_line(std::string_view line, const Place& place, const ReaderOptions& options);
/// The JSON value of one line, an object. Throws DataError "file:line: reason" for anything else.
nlohmann::ordered_json parse_json_line(std::string_view line, const Place& place,
                                       const ReaderOptions& options);

/// Rows of a file (JSON Lines, a JSON list, CSV, TSV, text; plain, gzip or zstd), one at a time;
/// memory is bounded by the longest row.
class JsonlReader {
 public:
  explicit JsonlReader(const std::filesystem::path& path, ReaderOptions options = {});

  struct Item {
    nlohmann::ordered_json value;  ///< the object as it stands in the file
    Row row;
    std::int64_t line = 0;
  };
  /// The next row, or nothing at the end. Throws DataError for a bad line; the line after it can
  /// then be read.
  std::optional<Item> next();
  std::int64_t line() const { return records_->line(); }
  /// The file in messages.
  const std::string& name() const { return records_->name(); }

 private:
  std::unique_ptr<RecordReader> records_;
  ReaderOptions options_;
};

}  // namespace heddle::data
