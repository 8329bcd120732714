#pragma once

#include <chrono>
#include <cstdint>
#include <map>
#include <optional>
#include <string>
#include <vector>

#include "cli/rank_processes.h"
#include "comm/store.h"
#include "config/run_config.h"

namespace heddle::cli {

/// The ranks of a launched job that only generate, and those of them that the job goes on without
/// (rl/membership.h). A launcher says in the job's store which were killed, and reads there which
/// the trainer has given up.
class LostRollouts {
 public:
  /// A command without such ranks loses nobody.
  LostRollouts() = default;
  LostRollouts(const config::RunConfig& config, std::int64_t ranks);
  /// Where the job's store is, which may not be served yet.
  void set_place(const comm::Endpoint& store, const std::string& secret);

  /// True if the job goes on without the rank that ended: a signal ended it after trainer and
  /// rollouts had met, and a whole replica is left. Says so.
  bool survives(const RankEnd& end);
  /// Ranks that the trainer has given up since the last call.
  std::vector<std::int64_t> given_up();
  /// Says at the end of a run without which ranks it ended.
  void report() const;

 private:
  bool can_lose() const { return size_ > replica_; }
  bool has_whole_replica() const;
  /// The value under a key of the job's store; nothing without an answer.
  std::optional<std::string> find(const std::string& key);
  bool connect();

  std::int64_t first_ = 0, size_ = 0, replica_ = 1;
  std::map<std::int64_t, std::string> lost_;  ///< Why, by rank.
  comm::Endpoint place_;
  std::string secret_;
  std::optional<comm::Store> store_;
  std::chrono::steady_clock::time_point next_try_, next_look_;
};

}  // namespace heddle::cli
