#include "cli/version.h"

#include <fmt/format.h>
#include <torch/headeronly/version.h>

namespace heddle::cli {

std::string version() { return HEDDLE_VERSION; }

std::string torch_version() { return TORCH_VERSION; }

std::string version_line() {
  return fmt::format("heddle {} (libtorch {}; {})", version(), torch_version(), HEDDLE_BACK_ENDS);
}

}  // namespace heddle::cli
