#pragma once

#include <string>

namespace heddle::testing {

// Only their object knows where the tree lies: all others are the same in every checkout, and the
// compiler's cache serves them all.

/// The path of a file or folder of the source tree; `path` from its root.
std::string source_path(const std::string& path);
/// The path of what was built, say of a program; `path` from the build folder.
std::string built_path(const std::string& path);

}  // namespace heddle::testing
