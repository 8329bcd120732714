#include "config/policy_versions.h"

#include <algorithm>

namespace heddle::config {
namespace {

/// In memory at most: an update waits for the end of the oldest one's completions where more would
/// be needed.
constexpr std::int64_t kMostSets = 16;

}  // namespace

std::int64_t staleness_of(const RunConfig& config) {
  const std::int64_t staleness = config.rl.staleness(), steps = config.train.max_steps;
  return steps > 0 ? std::min(staleness, steps) : staleness;
}

std::int64_t pinned_sets_of(const RunConfig& config) {
  if (config.rl.update_mode != UpdateMode::kPin) return 0;
  return std::min(staleness_of(config), kMostSets - 2) + 2;
}

}  // namespace heddle::config
