#pragma once

#include <map>
#include <memory>
#include <optional>
#include <span>
#include <vector>

#include "assembly/model_on_ranks.h"
#include "objective/policy.h"
#include "rl/critic.h"
#include "rl/entropy_bonus.h"
#include "rl/experience.h"
#include "rl/group_log.h"
#include "rl/group_source.h"
#include "rl/judge.h"
#include "rl/prompts.h"
#include "rl/reference.h"
#include "rl/run_length.h"
#include "rl/step_report.h"
#include "train/step_source.h"

namespace heddle::rl {

/// Optimizer steps on what the model in training generates: batches of groups, their advantages,
/// and where it is asked for the reference's log-probabilities. A batch is trained on by rl.epochs
/// passes of rl.sync_every steps, after which its weights are published.
class Steps : public train::StepSource {
 public:
  Steps(const config::RunConfig& config, train::Setup& setup, objective::Policy& policy);

  const data::LoaderInfo& info() const override { return info_; }
  std::string summary() const override;
  std::optional<data::Step> next() override;
  nlohmann::json cursor() override;
  void seek(const nlohmann::json& cursor) override;
  bool trains(std::int64_t step) const override;
  /// After a batch's last step: a checkpoint has no batch that some steps have had.
  bool may_pause() const override { return ends_batch(); }
  std::vector<ckpt::TensorPart> state(bool with_copies) const override;
  void load(const ckpt::TrainingCheckpoint& checkpoint) override;
  void on_updated(train::StepInfo& info) override;
  bool has_evaluation() const override { return held_out_.size() > 0; }
  /// Greedy completions of data.eval; the loss is the negative mean reward.
  train::Evaluation evaluate() override;

 private:
  bool is_first_rank() const { return setup_.placed.context.mesh.rank() == 0; }
  /// Groups that the steps given have taken.
  std::int64_t groups_taken() const;
  bool ends_batch() const { return updates_ == updates_of_batch_ || done_ == info_.total_steps; }
  /// The step given last is one of the first pass over its batch.
  bool is_first_pass() const { return updates_ <= experience_->parts(); }
  /// Part of the batch that the step given last is on.
  std::int64_t part() const { return (updates_ - 1) % experience_->parts(); }
  std::span<const Group> groups_of_step() const;
  /// The next batch and what is found of it before its first step. False at the end of the stream.
  bool begin_batch();
  /// `experts`: gets those that each row's tokens chose, see Experience::set_experts; `given`: by
  /// row those that they take, if there are any. Over the tokens that cuts left where there are
  /// any, whichever model it is.
  std::vector<train::RowScore> scores(const assembly::ModelOnRanks& model, bool with_adapters,
                                      std::vector<at::Tensor>* experts = nullptr,
                                      std::span<const at::Tensor> given = {}) const;
  void find_anchor();
  /// Passes over the prompts up to the step given last.
  double epoch() const;
  /// The stream of prompts ends before the steps that its rows would be enough for.
  void warn_of_early_end() const;
  void warn_of_no_loss(const data::Step& step) const;
  void record(std::span<const Fate> fates);
  /// The step's groups reach the ledger and its disk, in the first pass over them.
  void record_consumed();
  /// Gives the weights to whoever generates, under the next version.
  void publish();
  /// Begins the episodes of held-out prompts, which may have prompts of their own. Returns why some
  /// do not begin, by row.
  std::map<std::int64_t, std::string> open_episodes(std::vector<Group>& groups);
  /// GroupSource's standing after the step given last, with what that leaves of the batch.
  Batch standing();
  void require_published_weights();

  const config::RunConfig& config_;
  train::Setup& setup_;
  objective::Policy& policy_;
  Prompts prompts_, held_out_;
  data::LoaderInfo info_;
  std::unique_ptr<GroupSource> source_;
  Judge judge_;
  GroupLog log_;
  std::unique_ptr<Ledger> ledger_;        ///< On rank 0.
  std::unique_ptr<Reference> reference_;  ///< Null without rl.reference.kl_coef.
  EntropyBonus entropy_bonus_;
  std::unique_ptr<Critic> critic_;  ///< Null but with advantage gae.
  Begun begun_;
  std::int64_t done_ = 0;  ///< Steps given.
  /// Steps given on the batch, and how many it will have had.
  std::int64_t updates_ = 0, updates_of_batch_ = 0;
  bool has_loss_ = true;           ///< The last of them has a token to learn from.
  std::int64_t expert_width_ = 0;  ///< Choices of generation a token, see Experience.
  Batch batch_;                    ///< For the step under way, as what follows.
  std::optional<Experience> experience_;
  StepTimes times_;
  /// Finished groups of a checkpoint: of the last cursor() as bytes, on rank 0, and those loaded.
  at::Tensor saved_groups_;
  std::vector<Group> loaded_groups_;
};

/// The subject of `heddle rl`.
train::Subject subject(const config::RunConfig& config, train::Setup& setup);

}  // namespace heddle::rl
