#pragma once

#include <memory>
#include <optional>

#include "assembly/model_on_ranks.h"
#include "objective/policy.h"
#include "rl/critic.h"
#include "rl/experience.h"
#include "rl/group_log.h"
#include "rl/group_source.h"
#include "rl/judge.h"
#include "rl/prompts.h"
#include "rl/step_report.h"
#include "train/step_source.h"

namespace heddle::rl {

/// Optimizer steps on what the model in training generates: batches of groups, their advantages,
/// and where it is asked for the reference's log-probabilities.
class Steps : public train::StepSource {
 public:
  Steps(const config::RunConfig& config, train::Setup& setup, objective::Policy& policy);

  const data::LoaderInfo& info() const override { return info_; }
  std::string summary() const override;
  std::optional<data::Step> next() override;
  nlohmann::json cursor() const override;
  void seek(const nlohmann::json& cursor) override;
  bool trains(std::int64_t step) const override;
  std::vector<ckpt::TensorPart> state(bool with_copies) const override;
  void on_updated(train::StepInfo& info) override;
  bool has_evaluation() const override { return held_out_.size() > 0; }
  /// Greedy completions of data.eval; the loss is the negative mean reward.
  train::Evaluation evaluate() override;

 private:
  bool is_first_rank() const { return setup_.placed.context.mesh.rank() == 0; }
  void place_reference();
  std::vector<train::RowScore> reference_scores(const Experience& experience) const;
  void record_fates();
  /// The step's groups reach the ledger and its disk.
  void record_consumed();
  void require_published_weights();

  const config::RunConfig& config_;
  train::Setup& setup_;
  objective::Policy& policy_;
  Prompts prompts_, held_out_;
  data::LoaderInfo info_;
  std::unique_ptr<GroupSource> source_;
  Judge judge_;
  GroupLog log_;
  std::unique_ptr<Ledger> ledger_;  ///< On rank 0.
  /// A frozen copy of the model as the run began; null where adapters leave the base model so.
  std::unique_ptr<assembly::ModelOnRanks> reference_;
  std::unique_ptr<Critic> critic_;  ///< Null but with advantage gae.
  std::int64_t done_ = 0;           ///< Steps given.
  bool has_loss_ = true;            ///< The last of them has a token to learn from.
  std::int64_t expert_width_ = 0;   ///< See Experience.
  Batch batch_;                     ///< For the step under way, as the times.
  StepTimes times_;
};

/// The subject of `heddle rl`.
train::Subject subject(const config::RunConfig& config, train::Setup& setup);

}  // namespace heddle::rl
