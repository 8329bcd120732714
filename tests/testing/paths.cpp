#include "testing/paths.h"

namespace heddle::testing {

std::string source_path(const std::string& path) { return HEDDLE_SOURCE_DIR "/" + path; }

std::string built_path(const std::string& path) { return HEDDLE_BINARY_DIR "/" + path; }

}  // namespace heddle::testing
