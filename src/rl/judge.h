#pragma once

#include <map>
#include <memory>
#include <span>
#include <string>

#include "comm/group.h"
#include "config/run_config.h"
#include "reward/reward.h"
#include "rl/group.h"
#include "rl/prompts.h"

namespace heddle::rl {

struct Verdict {
  std::string error = {};  ///< Why there is no reward; else empty.
  /// Trajectories that go on -> the text before their next turn.
  std::map<std::size_t, std::string> observations = {};
};

/// The reward of a run. Rank 0 asks it; all ranks learn the answers.
class Judge {
 public:
  Judge(const config::RlReward& options, const comm::Group& everybody);

  /// A completion may be answered, so that its trajectory goes on with another turn.
  bool may_answer() const { return may_answer_; }

  /// Adds the rewards that the last turns of these trajectories of a prompt earn. Called by all
  /// ranks.
  Verdict judge(const Prompt& prompt, Group& group, std::span<const std::size_t> places);

 private:
  comm::Group everybody_;
  bool may_answer_;
  std::unique_ptr<reward::Reward> reward_;  ///< On rank 0.
};

}  // namespace heddle::rl
