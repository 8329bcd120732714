#pragma once

#include <future>
#include <memory>
#include <string>
#include <utility>

#include "assembly/model_on_ranks.h"
#include "config/run_config.h"
#include "rl/group_source.h"
#include "rl/link.h"
#include "rl/membership.h"
#include "rl/prompts.h"
#include "rl/reception.h"
#include "sync/weight_sync.h"

namespace heddle::rl {

/// Batches that the rollout ranks of the job generate (run_rollouts()), or those of another job
/// (run_rollout_job()), on the trainer's ranks. The weights go to them before the first batch and
/// after each step; they generate while the trainer trains, as far as rl.max_staleness admits. When
/// one dies or freezes, the others go on as the next generation, or another rollout job does, with
/// the weights and from the batch or the checkpoint that the trainer had last; a CommError comes
/// only when nobody is left, or for a failure that no loss explains.
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
  Batch standing() override;
  void restore(const nlohmann::json& state, std::vector<Group> finished,
               std::int64_t version) override;
  Publications take_publications() override { return std::exchange(publications_, {}); }

 private:
  /// The rollouts' answer to a message; on all trainer ranks.
  std::string ask(const nlohmann::json& message);
  void publish();
  /// Compares the rollouts' weights with the trainer's. Throws Error that names a tensor.
  void verify();
  void tell_state();
  void meet_rollouts();
  void connect();
  /// Does the work, anew with those that are left whenever rollouts are lost.
  template <class Work>
  void surviving(const Work& work);
  /// After a failure on all trainer ranks: goes on with the rollouts that are left, or throws.
  void recover(const std::string& failure);
  /// On all trainer ranks, until rank 0 has met rollouts. `reason`: why those before are lost.
  void await_rollouts(std::string reason);
  /// On rank 0: until a generation has met the trainer. Throws if nobody is left.
  void meet_those_left(std::string reason);
  /// On rank 0: until another job has met the trainer. Throws if none comes.
  void meet_another_job(std::string reason);
  /// On rank 0: throws CommError if a trainer has failed or the rollouts are lost.
  void look();
  /// On rank 0: what the other trainer ranks are told of the meeting; "" as long as it lasts.
  std::string news_of(std::future<void>& meeting, std::string& reason);

  const config::RunConfig& config_;
  const assembly::ModelOnRanks& model_;
  const Prompts& prompts_;
  c10::Device device_;
  std::shared_ptr<comm::World> world_;  ///< Null for one rank.
  comm::Group trainers_;
  std::unique_ptr<Reception> reception_;  ///< On rank 0, for rollouts of another job.
  /// On rank 0: the world in which it meets the rollouts: world_, or that of both jobs.
  std::shared_ptr<comm::World> joint_;
  std::unique_ptr<Roster> roster_;  ///< On rank 0, as the two below.
  std::unique_ptr<Link> link_;
  Channels met_;
  sync::Publisher publisher_;
  nlohmann::json state_;         ///< After the last batch or the last checkpoint.
  std::vector<Group> finished_;  ///< Groups of state_ that came with it.
  std::int64_t version_ = 0, rollout_ranks_;
  Publications publications_;            ///< See take_publications().
  std::int64_t jobs_without_batch_ = 0;  ///< Rollout jobs that came to nothing, in a row.
  bool is_published_ = false;
  std::uint64_t hash_ = 0;  ///< Checksum of what was published last.
};

}  // namespace heddle::rl
