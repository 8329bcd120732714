#pragma once

#include <cstdint>

#include "config/run_config.h"

namespace heddle::config {

/// Versions that a token may be old in a run of rl: rl.max_staleness in mode async; a run of so
/// many steps has no older ones.
std::int64_t staleness_of(const RunConfig& config);

/// Sets of adapters that each rank which generates has besides the model's own, for as long as its
/// engine lives: with rl.update_mode pin sequences may have each of the versions that the bound
/// admits, and one more is written. 0 with other modes.
std::int64_t pinned_sets_of(const RunConfig& config);

}  // namespace heddle::config
