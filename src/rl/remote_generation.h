#pragma once

#include <memory>
#include <string>

#include "assembly/model_on_ranks.h"
#include "config/run_config.h"
#include "rl/group_source.h"
#include "rl/link.h"
#include "rl/prompts.h"
#include "sync/weight_sync.h"

namespace heddle::rl {

/// Batches that the rollout ranks of the job generate (run_rollouts()), on the trainer's ranks. The
/// weights go to them before the first batch and after each step; they generate while the trainer
/// trains, as far as rl.max_staleness admits.
class RemoteGeneration final : public GroupSource {
 public:
  /// Meets the rollouts. All trainer ranks call it together; throws as meet(), and ModelError if
  /// the two sides do not have the same tensors.
  RemoteGeneration(const config::RunConfig& config, const assembly::ModelOnRanks& model,
                   const Prompts& prompts);
  /// Lets the rollouts end, unless an error is under way.
  ~RemoteGeneration() override;

  Batch next() override;
  void updated() override;
  std::int64_t version() const override { return version_; }
  std::string weights_hash() override;
  void restore(const nlohmann::json& state, std::int64_t version) override;

 private:
  /// The rollouts' answer to a message; on all trainer ranks.
  std::string ask(const std::string& message);
  void publish(const char* message);

  comm::Group trainers_;
  std::unique_ptr<Link> link_;  ///< On rank 0.
  sync::Publisher publisher_;
  std::int64_t version_ = 0;
  bool is_published_ = false;
  std::uint64_t hash_ = 0;  ///< Checksum of what was published last.
  double sync_s_ = 0;
};

/// Facts that the two sides of a run must share, as a text that they compare.
std::string facts_of_run(const config::RunConfig& config, const Prompts& prompts);

}  // namespace heddle::rl
