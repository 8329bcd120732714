#pragma once

#include <optional>

#include "config/run_config.h"

namespace heddle::config {

/// The share of the training rows that data.eval holds out, where it is a number such as 0.02
/// instead of files. Throws ConfigError where that is not above 0 and below 1.
std::optional<double> eval_share(const RunConfig& config);

}  // namespace heddle::config
