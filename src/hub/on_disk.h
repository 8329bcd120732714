#pragma once

#include <filesystem>

#include "base/files.h"

/// Questions to the disk whose errors are a no.
namespace heddle::hub {

inline bool is_folder(const files::Path& path) {
  std::error_code ignored;
  return std::filesystem::is_directory(path, ignored);
}

/// False where a link leads nowhere.
inline bool is_there(const files::Path& path) {
  std::error_code ignored;
  return std::filesystem::exists(path, ignored);
}

}  // namespace heddle::hub
