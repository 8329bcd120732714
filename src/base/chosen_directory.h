#pragma once

#include <string_view>

#include "base/files.h"

namespace heddle::files {

/// make_writable_directory() of a folder that the user chose with the key or option `key`, which
/// holds no link of another user: what is written below its name would land elsewhere. Throws
/// ConfigError that begins with the key.
void make_chosen_directory(const Path& path, std::string_view key);

}  // namespace heddle::files
