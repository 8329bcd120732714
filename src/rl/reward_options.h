#pragma once

#include "config/run_config.h"
#include "reward/reward.h"

namespace heddle::rl {

/// The source of rewards that rl.reward describes. Throws ConfigError.
reward::RewardOptions reward_options(const config::RlReward& section);
/// Throws ConfigError, which names the place of the key, for verifiers that do not exist or take
/// other parameters; starts no program.
void check_rewards(const config::RunConfig& config);

}  // namespace heddle::rl
