#include "base/random_hex.h"

#include <sys/random.h>

#include <fmt/format.h>

#include "base/errors.h"

namespace heddle {

std::string random_hex(int bytes) {
  std::string out;
  for (int i = 0; i < bytes; ++i) {
    unsigned char byte = 0;
    if (getrandom(&byte, 1, 0) != 1) throw FileError("getrandom() fails");
    out += fmt::format("{:02x}", byte);
  }
  return out;
}

}  // namespace heddle
