#pragma once

#include <memory>

#include "reward/reward.h"

namespace heddle::reward {

/// Scores by the user's program (worker_pool.h). Throws ConfigError for options out of range.
std::unique_ptr<Reward> make_process_reward(const ProcessOptions& options);

}  // namespace heddle::reward
