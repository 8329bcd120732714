#pragma once

#include <cstdint>
#include <map>
#include <optional>
#include <vector>

#include "rl/stale_policy.h"

namespace heddle::rl {

struct AdmissionOptions {
  std::int64_t max_staleness = 1;  ///< K: versions between a group's oldest token and the trainer.
  std::int64_t groups_per_batch = 32;  ///< B: a version's.
  std::int64_t max_inflight = 0;       ///< Running groups, a bound of memory; 0: none.
  StalePolicy policy = StalePolicy::kWait;
  /// Batches have the groups in their order, none overtaking another: which form a batch does not
  /// depend on who was faster.
  bool in_order = false;
};

/// Decides which groups may start and which form the next batch, so that no token older than K
/// versions is trained on. A batch is what one version is trained on:
///
///     admission   running + queued + B if the version's batch is cut <= (K + 1) B
///     batch cut   oldest version first, then the lowest cursor; it holds every group that would be
///                 older than K after the publication
///
/// Admission alone is not enough, because short trajectories overtake long ones. Knows no clock and
/// no thread: the caller holds a lock. Groups are named by their cursors.
class Admission {
 public:
  /// Throws ConfigError for options out of range.
  explicit Admission(AdmissionOptions options);
  /// After a resume: the trainer's version, whose batch is not cut. Nothing runs or is queued.
  void rebase(std::int64_t version);

  /// Groups that the bound of staleness admits now.
  std::int64_t room() const;
  /// Groups that may start now: room() as far as max_inflight lets them.
  std::int64_t capacity() const;
  /// `version`: of the weights that generate it. Throws InternalError if the group is there
  /// already, or without capacity.
  void start(std::int64_t cursor, std::int64_t version);
  /// Queues a running group whose oldest token has this version. False if it is too old already: it
  /// is forgotten.
  bool finish(std::int64_t cursor, std::int64_t oldest_version);
  /// Puts a finished group of a checkpoint back into the queue. False as above.
  bool restore(std::int64_t cursor, std::int64_t oldest_version);
  /// Forgets a group, running or queued: failed, filtered, aborted or its rollout died.
  void forget(std::int64_t cursor);

  struct Batch {
    std::vector<std::int64_t> cursors;  ///< To train on, oldest version first.
    std::vector<std::int64_t> dropped;  ///< Running, to be aborted (kDrop).
  };
  /// The next batch once it is there. `no_more`: no prompt will follow, new or again, so that a
  /// last batch may be smaller. The batch's groups leave the queue. Throws InternalError if a
  /// publication is due.
  std::optional<Batch> cut(bool no_more);
  /// The trainer's weights became version() + 1. Returns the groups that are too old now; they are
  /// forgotten. There are none unless groups start under versions older than version().
  std::vector<std::int64_t> publish();

  std::int64_t version() const { return version_; }
  std::int64_t running() const { return running_; }
  std::int64_t queued() const { return static_cast<std::int64_t>(groups_.size()) - running_; }

 private:
  struct Group {
    std::int64_t version;
    bool is_finished;
  };
  /// Would be too old after the next publication.
  bool expires(const Group& group) const {
    return group.version + options_.max_staleness <= version_;
  }

  /// It runs or is queued.
  void erase(std::int64_t cursor);

  AdmissionOptions options_;
  std::int64_t version_ = 0;
  bool is_cut_ = false;  ///< The batch of version_.
  std::map<std::int64_t, Group> groups_;
  std::int64_t running_ = 0;  ///< Groups that are not finished.
};

}  // namespace heddle::rl
