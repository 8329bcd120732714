#include "cli/rank_logs.h"

#include <sys/stat.h>

#include <fmt/chrono.h>

#include "base/errors.h"

namespace heddle::cli {

std::string last_error_line(std::ifstream& log) {
  log.clear();
  log.seekg(0);
  std::string line, found;
  while (std::getline(log, line)) {
    const auto at = line.find("error: ");
    if (at != std::string::npos) found = line.substr(at + 7);
  }
  return found;
}

void keep_earlier(const std::filesystem::path& log) {
  struct stat status {};
  if (stat(log.c_str(), &status) != 0 || status.st_size == 0) return;
  const std::string time = fmt::format("{:%Y%m%d-%H%M%S}", fmt::localtime(status.st_mtime));
  for (int copy = 1;; ++copy) {
    const std::string suffix = copy == 1 ? "" : fmt::format("-{}", copy);
    const std::filesystem::path kept =
        log.parent_path() / fmt::format("{}.{}{}.log", log.stem().string(), time, suffix);
    if (std::filesystem::exists(kept)) continue;
    std::error_code error;
    std::filesystem::rename(log, kept, error);
    if (error) throw_error<FileError>("cannot rename {}: {}", log.string(), error.message());
    return;
  }
}

}  // namespace heddle::cli
