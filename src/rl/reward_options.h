#pragma once

#include "config/run_config.h"
#include "reward/reward.h"

namespace heddle::rl {

/// The source of rewards that rl.reward describes. Throws ConfigError.
reward::RewardOptions reward_options(const config::RlReward& section);

}  // namespace heddle::rl
