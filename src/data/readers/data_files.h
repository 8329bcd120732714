#pragma once

#include <string>
#include <vector>

namespace heddle::data {

/// True where a file's name ends as those of data do: .jsonl, .json, .ndjson, .csv, .tsv, .txt, and
/// with .gz, .zst or .xz after it; .parquet, .arrow.
bool is_data_file(std::string name);

/// The files that a path of the user stands for, in the order of their names: a file or "-" itself,
/// those that match a pattern (* and ? within a folder or file name, ** for any folders), those of
/// a folder and the folders in it that end as data files do (.jsonl, .json, .csv, .tsv, .txt, also
/// with .gz, .zst or .xz; .parquet, .arrow). A path that is not there is given back as it is, for
/// the reader to name. Throws DataError where a pattern or a folder gives no file.
std::vector<std::string> expand_files(const std::string& path);

}  // namespace heddle::data
