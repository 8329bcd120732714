#pragma once

#include <memory>
#include <span>

#include "comm/group.h"
#include "config/run_config.h"
#include "reward/reward.h"
#include "rl/group.h"
#include "rl/prompts.h"

namespace heddle::rl {

/// The reward of a run. Rank 0 asks it; all ranks learn the answers.
class Judge {
 public:
  Judge(const config::RlReward& options, const comm::Group& everybody);

  /// Fills the rewards of a prompt's trajectories. Called by all ranks. Returns why there are none,
  /// or "".
  std::string judge(const Prompt& prompt, Group& group);

 private:
  comm::Group everybody_;
  std::unique_ptr<reward::Reward> reward_;  ///< On rank 0.
};

}  // namespace heddle::rl
