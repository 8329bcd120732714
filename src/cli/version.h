#pragma once

#include <string>

namespace heddle::cli {

std::string version();        ///< "0.1.0"
std::string torch_version();  ///< "2.11.0"
std::string version_line();   ///< "heddle 0.1.0 (libtorch 2.11.0, CPU)"

}  // namespace heddle::cli
