#pragma once

#include <string>

namespace heddle::testing {

/// The path of a file or folder of the source tree that the tests were built from. `path`: from the
/// root of the tree. The only object that knows where the tree lies: all others are the same for
/// every checkout, and the compiler's cache serves them all.
std::string source_path(const std::string& path);

}  // namespace heddle::testing
