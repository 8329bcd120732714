#pragma once

#include <cstdint>
#include <map>
#include <memory>
#include <optional>
#include <set>
#include <vector>

#include "base/rng.h"
#include "rl/admission.h"
#include "rl/ledger.h"

namespace heddle::rl::testing {

/// How a run goes: everything is drawn from the seed, and time is counted in ticks.
struct Plan {
  AdmissionOptions admission;
  std::int64_t rows = 20, max_attempts = 4;
  bool aborts_at_update = false;  ///< Running groups start anew when the rollout gets new weights.
  double failing = 0, filtered = 0;                       ///< Share of groups.
  double rollout_dies = 0, trainer_dies = 0, pauses = 0;  ///< Each tick.
  std::int64_t longest = 20;      ///< Ticks of a group; the law has a heavy tail.
  std::int64_t update_delay = 0;  ///< Ticks until the rollout has a publication.
  std::int64_t steps_per_checkpoint = 3;
};

struct Outcome {
  bool is_finished = false;  ///< Before the patience ended.
  std::int64_t max_staleness = 0, attempts = 0;
  std::map<std::int64_t, int> consumed;  ///< Times, by cursor, in the line of steps that counts.
  std::set<std::int64_t> rejected;
};

/// A rollout and a trainer in virtual time over the real ledger and the real admission rule.
class Schedule {
 public:
  Schedule(const Plan& plan, std::uint64_t seed, files::Path ledger);
  Outcome run();
  /// Ticks that attempt 0 of a group takes.
  std::int64_t length_of(std::int64_t cursor, std::int64_t attempt) const;

 private:
  struct Running {
    std::int64_t left, version;
  };
  struct Checkpoint {
    std::uint64_t offset = 0;
    std::int64_t version = 0;
    std::map<std::int64_t, std::int64_t> queued;  ///< Version by cursor.
    Outcome outcome;
  };

  bool chance(double probability);
  void dispatch();
  void advance();
  void end(std::int64_t cursor);
  void issue_again(std::int64_t cursor, Rejection reason);
  void lose_rollout();
  void train();
  void publish();
  void save();
  void resume();

  Plan plan_;
  CounterRng random_;
  std::uint64_t drawn_ = 0;
  files::Path path_;
  std::unique_ptr<Ledger> ledger_;
  std::optional<Admission> admission_;
  std::map<std::int64_t, Running> running_;
  std::map<std::int64_t, std::int64_t>
      queued_;  ///< Version by cursor, beside the rule's own count.
  std::set<std::int64_t> again_;
  std::int64_t tick_ = 0, step_ = 0, rollout_version_ = 0, update_due_ = -1, paused_until_ = 0;
  Checkpoint checkpoint_;
  Outcome outcome_;
};

}  // namespace heddle::rl::testing
