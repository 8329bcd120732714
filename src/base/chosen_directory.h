#pragma once

#include <string_view>

#include "base/files.h"

namespace heddle::files {

/// make_writable_directory() of a folder that the user chose with the key or option `key`. Throws
/// ConfigError that begins with it.
void make_chosen_directory(const Path& path, std::string_view key);

}  // namespace heddle::files
