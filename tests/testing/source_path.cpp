#include "testing/source_path.h"

namespace heddle::testing {

std::string source_path(const std::string& path) {
  return std::string(HEDDLE_SOURCE_DIR "/") + path;
}

}  // namespace heddle::testing
