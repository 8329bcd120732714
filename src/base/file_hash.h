#pragma once

#include <filesystem>
#include <string>

namespace heddle::hash {

/// The content of a file as 32 hexadecimal digits, of Hasher. Throws FileError.
std::string of_file(const std::filesystem::path& path);

}  // namespace heddle::hash
