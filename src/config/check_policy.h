#pragma once

// Inside src/config only.

#include <string>

#include "config/config.h"

namespace heddle::config {

/// Refusals of keys of `heddle rl` that do not fit together (train.objective policy). `source`: the
/// file, for keys that were not given. Throws ConfigError.
void check_policy(const RunConfig& config, const std::string& source);

}  // namespace heddle::config
