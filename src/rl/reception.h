#pragma once

#include <cstdint>
#include <memory>
#include <optional>
#include <string>

#include "comm/world.h"
#include "config/run_config.h"
#include "rl/rendezvous.h"
#include "rl/run_facts.h"

namespace heddle::rl {

/// A rollout job that waits at the trainer's store.
struct Guest {
  std::int64_t number = 0, ranks = 0;
};

/// The trainers' side of the meeting of two jobs (rendezvous.h), on their rank 0. It takes one
/// rollout job at a time; a further one waits until that is lost.
class Reception {
 public:
  /// Opens the store and writes the file; takes over the secret of a file that stands there, so
  /// that a copy of it on another host stays valid. `own`: the trainers' world, null for one rank.
  /// Throws ConfigError for sync.listen and sync.rendezvous, CommError, FileError.
  Reception(const config::RunConfig& config, const comm::World* own, Facts facts);
  /// Lets those that wait end, and gives them a few seconds to read it, unless an error is under
  /// way.
  ~Reception();
  Reception(const Reception&) = delete;
  Reception& operator=(const Reception&) = delete;

  /// The next rollout job that has our facts; refuses others. `lost`: why the one before is gone,
  /// "" for the first. Throws CommError after sync.rendezvous_timeout_s, or when a trainer fails.
  Guest await(const std::string& lost);
  /// The job of both, in which this rank is rank 0. Throws CommError.
  std::shared_ptr<comm::World> admit(const Guest& guest);
  /// Another rollout job waits.
  bool has_guest() const;
  /// Waits a few seconds until the rollouts have left the job of both.
  void wait_until_empty() const;

 private:
  std::optional<Guest> next_guest();
  std::int64_t arrived() const { return opened_.store.add(kArrivedKey, 0); }

  const config::RunConfig& config_;
  const comm::World* own_;
  Facts facts_;
  OpenedStore opened_;
  std::optional<OpenedStore> joint_;  ///< Store of the job of both.
  std::int64_t last_ = 0;             ///< Number of the last job that was looked at.
};

}  // namespace heddle::rl
