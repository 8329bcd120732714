#include "data/readers/data_files.h"

#include <algorithm>
#include <cctype>
#include <filesystem>

#include "base/errors.h"
#include "base/text.h"

namespace heddle::data {
namespace {

namespace fs = std::filesystem;

constexpr std::string_view kEndings[] = {".jsonl", ".json", ".ndjson",  ".csv",
                                         ".tsv",   ".txt",  ".parquet", ".arrow"};

std::vector<std::string> files_of(const fs::path& folder) {
  std::vector<std::string> files;
  for (const auto& entry : fs::recursive_directory_iterator(folder)) {
    const std::string name = entry.path().filename().string();
    if (!name.starts_with('.') && entry.is_regular_file() && is_data_file(name))
      files.push_back(entry.path().string());
  }
  return files;
}

/// Appends what matches the parts of a pattern from `at` on, below `folder`.
void match(const fs::path& folder, const std::vector<std::string>& parts, std::size_t at,
           std::vector<std::string>& files) {
  const std::string& part = parts[at];
  const bool is_last = at + 1 == parts.size();
  if (part.find_first_of("*?") == std::string::npos) {
    const fs::path next = folder / part;
    if (is_last && fs::is_regular_file(next)) files.push_back(next.string());
    if (!is_last && fs::is_directory(next)) match(next, parts, at + 1, files);
    return;
  }
  const bool any_depth = part == "**";
  if (any_depth && !is_last) match(folder, parts, at + 1, files);
  std::error_code unreadable;
  for (const auto& entry : fs::directory_iterator(folder.empty() ? "." : folder, unreadable)) {
    const std::string name = entry.path().filename().string();
    if (name.starts_with('.') || !text::matches_glob(part, name)) continue;
    const fs::path next = folder / name;
    if (fs::is_directory(next) && !fs::is_symlink(next) && any_depth) match(next, parts, at, files);
    if (fs::is_directory(next) && !any_depth && !is_last) match(next, parts, at + 1, files);
    if (fs::is_regular_file(next) && is_last) files.push_back(next.string());
  }
}

}  // namespace

bool is_data_file(std::string name) {
  std::transform(name.begin(), name.end(), name.begin(),
                 [](unsigned char c) { return static_cast<char>(std::tolower(c)); });
  for (const std::string_view packed : {".gz", ".zst", ".xz"}) {
    if (name.ends_with(packed)) name.resize(name.size() - packed.size());
  }
  return std::any_of(std::begin(kEndings), std::end(kEndings),
                     [&](std::string_view ending) { return name.ends_with(ending); });
}

std::vector<std::string> expand_files(const std::string& path) {
  std::vector<std::string> files;
  if (fs::is_directory(path)) {
    files = files_of(path);
    if (files.empty()) {
      throw_error<DataError>(
          "{} is a folder without data files (.jsonl, .json, .csv, .tsv, .txt, also .gz, .zst or "
          ".xz; .parquet, .arrow)",
          path);
    }
  } else if (!fs::exists(path) && path.find_first_of("*?") != std::string::npos) {
    std::vector<std::string> parts;
    for (const fs::path& part : fs::path(path).relative_path()) parts.push_back(part.string());
    match(fs::path(path).root_path(), parts, 0, files);
    if (files.empty()) throw_error<DataError>("{}: no file matches the pattern", path);
  } else {
    return {path};
  }
  std::sort(files.begin(), files.end());
  return files;
}

}  // namespace heddle::data
