#pragma once

#include <memory>

#include "reward/reward.h"

namespace heddle::reward {

/// A user's program that plays episodes (docs/rewards.md: op reset, step, close): a sample with
/// Ask::kOpening begins one, others are its turns. An episode stays with one worker, which keeps
/// its state; if that ends, its episodes fail. Throws ConfigError for options out of range.
std::unique_ptr<Reward> make_environment_reward(const ProcessOptions& options);

}  // namespace heddle::reward
