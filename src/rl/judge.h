#pragma once

#include <cstdint>
#include <map>
#include <memory>
#include <string>
#include <vector>

#include "comm/group.h"
#include "config/run_config.h"
#include "reward/reward.h"
#include "reward/score_queue.h"
#include "rl/group.h"
#include "rl/prompts.h"

namespace heddle::rl {

/// The judgement of a trajectory's last turn.
struct Verdict {
  std::int64_t cursor = 0, attempt = 0;  ///< Its group's.
  std::size_t place = 0;                 ///< In the group.
  reward::Score score = {};
};

/// The reward of a run. Rank 0 asks it, and all ranks learn the answers at the same call. Verifiers
/// answer at once; programs and servers work while the model goes on generating.
class Judge {
 public:
  /// In order: verdicts do not depend on how long each took; whoever takes them waits for all.
  /// Throws ConfigError.
  Judge(const config::RlReward& options, bool in_order, const comm::Group& everybody);

  /// A completion may be answered, so that its trajectory goes on with another turn.
  bool may_answer() const { return may_answer_; }

  /// Gives the last turn of a trajectory to be judged. Called by all ranks.
  void submit(const Prompt& prompt, const Group& group, std::size_t place);
  /// Turns that were given and whose verdicts were not taken.
  std::int64_t pending() const { return pending_; }
  /// All that is pending is there with the next take().
  bool answers_at_once() const { return answers_at_once_; }
  /// Verdicts that have come since the last call; if `waits`, waits a moment for the first. Called
  /// by all ranks, which get the same. Throws on all what stopped the judging.
  std::vector<Verdict> take(bool waits);

 private:
  std::vector<Verdict> scored(bool waits);
  std::vector<Verdict> exchange(bool waits);

  comm::Group everybody_;
  bool in_order_, answers_at_once_, may_answer_;
  std::int64_t pending_ = 0;
  /// On rank 0, one of the two.
  std::unique_ptr<reward::Reward> reward_;
  std::unique_ptr<reward::ScoreQueue> queue_;
  std::vector<reward::Sample> samples_;         ///< For reward_.
  std::vector<Verdict> asked_;                  ///< Places of samples_.
  std::map<std::uint64_t, Verdict> under_way_;  ///< By the queue's numbers.
};

}  // namespace heddle::rl
