#pragma once

// Inside src/config only.

#include <string>

#include "config/config.h"

namespace heddle::config {

/// Throws ConfigError where keys that are fine alone do not fit together, or, if complete, where a
/// required one is missing. `source` is the file's name for messages about what is absent.
void check(const RunConfig& config, const std::string& source, Completeness completeness);

/// Throws a ConfigError that begins with the place where the key was given, or with `source`.
[[noreturn]] void refuse(const RunConfig& config, const std::string& source, const std::string& key,
                         const std::string& message);

}  // namespace heddle::config
