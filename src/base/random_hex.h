#pragma once

#include <string>

namespace heddle {

/// The system's random bytes as hexadecimal digits. Throws FileError if it has none.
std::string random_hex(int bytes);

}  // namespace heddle
