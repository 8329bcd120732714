#pragma once

#include <cstdint>
#include <map>
#include <memory>
#include <set>
#include <string>
#include <vector>

#include "comm/group.h"
#include "config/run_config.h"
#include "reward/reward.h"
#include "reward/score_queue.h"
#include "rl/dialogue.h"
#include "rl/group.h"
#include "rl/prompts.h"

namespace heddle::rl {

/// The judgement of a trajectory's last turn.
struct Verdict {
  std::int64_t cursor = 0, attempt = 0;  ///< Its group's.
  std::size_t place = 0;                 ///< In the group.
  reward::Score score = {};
  bool is_opening = false;  ///< The score has an episode's prompt, if it has one of its own.
  std::int32_t last = -1;   ///< Last token of the turn.
  /// The turn as a message, and with a score that goes on also the answer; with rl.history render.
  Json messages = Json::array();
};

/// The reward of a run. Rank 0 asks it, and all ranks learn the answers at the same call. Verifiers
/// answer at once; programs and servers work while the model goes on generating.
class Judge {
 public:
  /// In order: verdicts do not depend on how long each took; whoever takes them waits for all.
  /// Configuration and tokenizer outlive it. Throws ConfigError.
  Judge(const config::RunConfig& config, const data::Tokenizer& tokenizer, bool in_order,
        const comm::Group& everybody);

  /// A completion may be answered, so that its trajectory goes on with another turn.
  bool may_answer() const { return may_answer_; }

  /// Trajectories are episodes of an environment: each is opened before its first turn, and closed.
  bool has_episodes() const { return has_episodes_; }
  /// Begins an episode. Called by all ranks, as close().
  void open(const Prompt& prompt, const Group& group, std::size_t place, std::uint64_t seed);
  /// The episodes of a group are over, whether they have ended or not.
  void close(const Group& group);
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
  void ask(reward::Sample sample, const Verdict& asked);
  /// Says once of each key that nothing reads it.
  void name_unread(const reward::Score& score);
  reward::Sample sample_of(const Prompt& prompt, const Group& group, std::size_t place) const;
  /// Messages become the observation that they are rendered as; with rl.history render they stay.
  void render(Verdict& verdict) const;
  std::vector<Verdict> scored(bool waits);
  std::vector<Verdict> exchange(bool waits);

  comm::Group everybody_;
  bool in_order_, answers_at_once_, may_answer_, has_episodes_, renders_history_;
  std::int64_t pending_ = 0;
  std::unique_ptr<Dialogue> dialogue_;  ///< On rank 0, if completions may be answered.
  /// On rank 0, one of the two.
  std::unique_ptr<reward::Reward> reward_;
  std::unique_ptr<reward::ScoreQueue> queue_;
  std::set<std::string> unread_;                ///< Keys of answers that nothing reads.
  std::vector<reward::Sample> samples_;         ///< For reward_.
  std::vector<Verdict> asked_;                  ///< Places of samples_.
  std::map<std::uint64_t, Verdict> under_way_;  ///< By the queue's numbers.
};

}  // namespace heddle::rl
