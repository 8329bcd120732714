#pragma once

#include <atomic>
#include <chrono>
#include <filesystem>
#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "ckpt/training_checkpoint.h"
#include "config/run_config.h"
#include "data/loader/loader.h"
#include "objective/objective.h"
#include "train/learner.h"
#include "train/loop_state.h"
#include "train/observer.h"
#include "train/run_lock.h"
#include "train/schedule.h"
#include "train/setup.h"
#include "train/step_source.h"
#include "train/untrained.h"

namespace heddle::train {

/// The optimizer loop of one run: micro-batches forward and backward, clip, update, evaluation,
/// checkpoints, and the final model or adapter directory.
class Trainer {
 public:
  /// Loads everything, resumes if the configuration says so. `stop` is read after every step: when
  /// it turns true on any rank the run saves a checkpoint and returns, after the step that the
  /// device has been given already, if there is one. `world`: the ranks that
  /// train together, each with a Trainer of the same configuration; null for one rank.
  Trainer(const config::RunConfig& config, Observer& observer, const std::atomic<bool>& stop,
          std::shared_ptr<comm::World> world = nullptr,
          const MakeSubject& make_subject = dataset_subject);

  /// Where it throws, the other ranks have been told why: they wait for this one, and its Trainer's
  /// destructor for the checkpoint that is being written.
  Summary run();
  const Setup& setup() const { return setup_; }
  Setup& setup() { return setup_; }
  /// Null unless train.recompute is auto.
  const AutoRecompute* recompute() const { return learner_.recompute(); }

 private:
  Summary train();
  /// A step of the source, and if the device has been given it already what it will report.
  struct TakenStep {
    data::Step step;
    std::optional<QueuedSteps::Queued> queued;
    nlohmann::json cursor;  ///< The place in the data before the step; only with train.spike stop.
  };
  /// Divisors of sums over a step.
  struct Divisors {
    double loss;
    double sparse_tokens;  ///< Divisor of the router's loss: tokens times layers with experts.
  };
  /// Throws DataError if the step has no loss.
  Divisors divisors_of(const data::Step& step) const;
  double learning_rate_of(const data::Step& step) const;
  Learner::StepOptions options_of(const data::Step& step) const;
  /// Gives the device the step after `step`, which is under way, unless something comes between.
  void queue_next(const data::Step& step);
  /// The step in ahead_, else the source's next one; nothing at the end.
  std::optional<TakenStep> next_step();
  StepInfo train_step(TakenStep taken);
  /// The source's next step with its place in the data.
  std::optional<TakenStep> take_step();
  /// Counts a step whose gradient norm stood out, or ends the run.
  void judge_norm(const Learner::Outcome& outcome, const TakenStep& taken, StepInfo& info);
  /// Runs or awaits it, and queues the next one where that is possible.
  Learner::Outcome run(TakenStep& taken);
  /// Called by all ranks with the same message; nothing to do for an empty one.
  void warn(const std::string& message);
  Pause pause_behind(std::int64_t done) const;
  Evaluation evaluate();
  /// Before the first step.
  void evaluate_on_start();
  /// This rank's part of a checkpoint: trained and kept parameters.
  std::vector<ckpt::TensorPart> state(bool with_copies) const;
  void keep(nn::Parameter& parameter);
  /// With the place in the data of the next step, or an earlier one.
  void save(std::int64_t step, std::optional<nlohmann::json> cursor = std::nullopt);
  void resume();
  /// From a checkpoint whose contents have been verified.
  void restore(const ckpt::Path& path);
  void restore_kept(const ckpt::TrainingCheckpoint& checkpoint);
  RunInfo describe() const;
  /// "train.max_steps 8": what ended the run that this one continues; empty if it had not.
  std::string limit_reached() const;
  /// Report of the training that ended after so many steps.
  void fill(Summary& summary, std::int64_t steps) const;
  /// Micro-batches of a data rank in a usual step.
  double usual_micro_batches() const;
  /// Called by all ranks; rank 0 writes.
  std::filesystem::path export_final();
  /// Where a whole tensor comes from when the ranks divide it: the checkpoint last written or, if
  /// there was nothing left to do, restored; for what it does not hold the source.
  ckpt::ReadWhole whole_tensors() const;
  /// Evaluates if the pause after the step says so; true if the run should stop early.
  bool evaluate_if_due(StepInfo& info, const Pause& pause);
  /// Whether so many evaluations brought no gain that train.early_stop_patience ends the run.
  bool has_lost_patience() const;

  config::RunConfig config_;
  Observer& observer_;
  const std::atomic<bool>& stop_;
  std::unique_ptr<RunLock> lock_;  ///< Lock of rank 0; made before anything is written.
  Setup setup_;
  Subject subject_;
  objective::Objective& objective_;
  StepSource& steps_;
  Learner learner_;
  UntrainedWatch untrained_;
  config::RunConfig paced_;         ///< With what is given in epochs and shares as steps.
  std::optional<TakenStep> ahead_;  ///< Queued after the step under way.
  std::chrono::steady_clock::time_point last_end_;  ///< Time at which a step ended.
  std::unique_ptr<ckpt::CheckpointStore> checkpoints_;
  double auxiliary_coefficient_ = 0;
  double peak_flops_ = 0;  ///< Sum over all ranks; 0: not known, or not the first rank.
  /// Not trained, yet not what the source holds: made for this run (a new head), or trained before
  /// it was continued. Checkpoints hold them beside what is trained.
  std::vector<nn::Parameter*> kept_;
  std::int64_t first_step_ = 0;
  std::int64_t last_saved_ = -1;
  ckpt::Path last_checkpoint_;  ///< Checkpoint of that step; empty before the first.
  LoopState loop_;
  std::optional<double> last_eval_;
  bool improved_ = false;  ///< The evaluation after the last step was the best so far.
};

}  // namespace heddle::train
