#pragma once

#include <cstdint>
#include <functional>
#include <map>
#include <memory>
#include <set>
#include <string>
#include <vector>

#include "config/run_config.h"
#include "rl/admission.h"
#include "rl/group.h"
#include "rl/judge.h"
#include "rl/prompts.h"
#include "rollout/engine.h"
#include "train/setup.h"

namespace heddle::rl {

/// Counts of what generation did since the last batch.
struct GenerationCounts {
  std::int64_t tokens = 0, groups = 0;
  std::int64_t filtered = 0, failed = 0, stale = 0;
  std::int64_t all_right = 0, all_wrong = 0;  ///< Groups of equal rewards, above 0 or not.
  double seconds = 0, judging_s = 0;
};

/// Generates groups with the weights in training and gives them in batches, none of whose tokens
/// is older than rl.max_staleness versions. Generation and training take turns in one process and
/// share the weights. In mode sync, or with staleness 0, a batch is generated whole before it is
/// given. All ranks call it together, and all have all groups.
class Generation {
 public:
  /// `end`: cursors are below it.
  Generation(const config::RunConfig& config, train::Setup& setup, const Prompts& prompts,
             std::int64_t end);

  /// The next batch in the order of cursors; empty at the end of the stream.
  std::vector<Group> next();
  /// The weights have changed.
  void updated();

  std::int64_t version() const { return admission_.version(); }
  GenerationCounts take_counts() { return std::exchange(counts_, {}); }

  /// State for a checkpoint: groups under way are generated anew, with another seed.
  nlohmann::json state() const;
  void restore(const nlohmann::json& state);

 private:
  struct Running {
    Group group;
    std::map<rollout::RequestId, std::size_t> requests;  ///< Under way -> its trajectory.
  };

  void make_engine();
  void dispatch();
  void start(std::int64_t cursor, std::int64_t attempt);
  /// One pass of the engine, and what follows from the sequences that ended.
  void advance();
  void take(Running& running, std::size_t place, rollout::Completion completion);
  void finish(std::int64_t cursor);
  /// A group goes back to the prompts.
  void abort(std::int64_t cursor);
  bool may_filter() const;

  const config::RunConfig& config_;
  train::Setup& setup_;
  const Prompts& prompts_;
  std::int64_t end_;
  Judge judge_;
  Admission admission_;
  std::vector<std::int32_t> stop_ids_;
  std::unique_ptr<rollout::Engine> engine_;  ///< Made by the first batch.
  std::map<std::int64_t, Running> running_;  ///< By cursor.
  std::map<rollout::RequestId, std::int64_t> cursor_of_;
  std::map<std::int64_t, Group> finished_;      ///< By cursor.
  std::map<std::int64_t, std::int64_t> again_;  ///< Cursor to issue again -> its attempt.
  std::int64_t next_cursor_ = 0;
  std::int64_t generated_since_cut_ = 0;  ///< Groups, filtered ones included.
  GenerationCounts counts_;
};

}  // namespace heddle::rl
