#pragma once

#include <cstdint>
#include <vector>

#include <nlohmann/json.hpp>

#include "rl/group.h"
#include "rl/ledger.h"
#include "rollout/engine_counts.h"

namespace heddle::rl {

/// Counts of what generation did for a batch.
struct GenerationCounts {
  std::int64_t tokens = 0, groups = 0;
  std::int64_t filtered = 0, failed = 0, stale = 0;
  /// Tokens that the policy drew for these.
  std::int64_t filtered_tokens = 0, failed_tokens = 0, stale_tokens = 0;
  std::int64_t all_right = 0, all_wrong = 0;  ///< Groups of equal rewards, above 0 or not.
  double seconds = 0, judging_s = 0;  ///< In passes, and that part of it in which rewards came.
  double elapsed_s = 0;               ///< Since the batch before.
  /// Groups when the batch was there, those of it left out: under way, and finished.
  std::int64_t running = 0, queued = 0;
  std::int64_t capacity = 0;  ///< Groups that the bound of staleness would admit besides then.
  double queue_age_s = 0;     ///< Mean time that the batch's groups waited for it.
  double paused_s = 0;        ///< Other ranks generate: time that they stood still for weights.
  std::int64_t prefill_saved = 0;  ///< Tokens of prompts that another sequence's state held.
  rollout::EngineCounts engine = {};
  bool operator==(const GenerationCounts&) const = default;
};

/// An event in the life of a group, for the ledger.
struct Fate {
  enum class Kind { kDispatched, kCompleted, kRejected };
  Kind kind = Kind::kDispatched;
  Dispatch dispatch = {};  ///< For the other kinds its cursor alone counts.
  Rejection reason = Rejection::kFailed;
  std::int64_t tokens = 0;  ///< Rejected: generated so far.
};

/// Groups that a version of the weights is trained on, in the order of their cursors, none at the
/// end of the stream; and what happened since the batch before.
struct Batch {
  std::vector<Group> groups = {};
  GenerationCounts counts = {};
  std::vector<Fate> fates = {};
  /// Where the stream stands after it, see GroupSource::restore().
  nlohmann::json state = {};
  /// Other ranks generate: seconds that next() waited for the batch, and that weights took in it.
  double waited_s = 0, sync_s = 0;
  std::int64_t rollout_ranks = 0;  ///< Other ranks generate: how many they are.
};

/// Weights that went to whoever generates.
struct Publications {
  std::int64_t bytes = 0, damaged = 0;  ///< Damaged: buckets that were sent again.
  std::int64_t verified = 0;            ///< Tensors that were compared with the trainer's.
  double wire_s = 0;                    ///< Time of gathering, sending and checking them.
  double rendezvous_s = 0;              ///< Time of meeting whoever generates; 0: did not.
};

/// Where batches come from: the model in training, or other ranks. All trainer ranks make the same
/// calls and get the same batches.
class GroupSource {
 public:
  virtual ~GroupSource() = default;
  /// None of the batch's tokens is older than rl.max_staleness versions.
  virtual Batch next() = 0;
  /// The weights have changed: after each batch, once it was trained on.
  virtual void updated() = 0;
  /// Version of the weights in training.
  virtual std::int64_t version() const = 0;
  /// hash_text() of the weights of version(), as whoever generates has them; on rank 0. All ranks
  /// call it together.
  virtual std::string weights_hash() = 0;
  /// Publications since the last call; a model that generates itself has none.
  virtual Publications take_publications() { return {}; }
  /// For a checkpoint between a version's publication and the next batch: the groups that are
  /// finished and that no batch has had, what happened since the last batch, and where the stream
  /// stands with them.
  virtual Batch standing() = 0;
  /// Goes on from a state, with the weights that the trainer has now. Finished groups of the state
  /// wait for a batch again if they are among these; the others, those that are too old, and what
  /// was under way are generated anew, with another seed.
  virtual void restore(const nlohmann::json& state, std::vector<Group> finished,
                       std::int64_t version) = 0;
};

}  // namespace heddle::rl
