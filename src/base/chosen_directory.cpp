#include "base/chosen_directory.h"

#include <sys/stat.h>
#include <unistd.h>

#include "base/errors.h"

namespace heddle::files {
namespace {

/// A link belongs there if who owns the folder made it, or this process's user or root.
void refuse_links_of_others(const Path& folder) {
  struct stat here {};
  if (stat(folder.c_str(), &here) != 0) return;
  std::error_code error;
  for (const auto& entry : std::filesystem::directory_iterator(folder, error)) {
    struct stat link {};
    if (lstat(entry.path().c_str(), &link) != 0 || !S_ISLNK(link.st_mode)) continue;
    if (link.st_uid == geteuid() || link.st_uid == 0 || link.st_uid == here.st_uid) continue;
    throw_error<FileError>(
        "{} is a link that another user (number {}) made: remove it, or name a folder that nobody "
        "else may write to",
        entry.path().string(), link.st_uid);
  }
}

}  // namespace

void make_chosen_directory(const Path& path, std::string_view key) {
  try {
    make_writable_directory(path);
    refuse_links_of_others(path);
  } catch (const FileError& error) {
    throw_error<ConfigError>("{}: {}", key, error.what());
  }
}

}  // namespace heddle::files
