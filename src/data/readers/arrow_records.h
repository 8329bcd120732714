#pragma once

#include <filesystem>
#include <memory>
#include <string_view>

#include "data/readers/record_reader.h"

namespace heddle::data {

/// Whether a regular file is Parquet or Arrow, by its first bytes; a stream of Arrow, which has no
/// mark of its own, by its first bytes and its name's ending .arrow or .arrows.
bool is_arrow_file(const std::filesystem::path& path);

/// Rows of a Parquet file, an Arrow file or an Arrow stream. line() is the number of the row.
/// Throws DataError, also where libheddle_arrow.so or Arrow's libraries are missing.
std::unique_ptr<RecordReader> open_arrow_file(const std::filesystem::path& path,
                                              std::size_t max_bytes);

}  // namespace heddle::data
