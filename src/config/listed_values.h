#pragma once

#include <string>
#include <utility>
#include <vector>

namespace heddle::config {

/// The values of each key that has a short list of them, for completion.
std::vector<std::pair<std::string, std::vector<std::string>>> listed_values();

}  // namespace heddle::config
