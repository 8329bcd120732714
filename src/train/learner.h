#pragma once

#include <cstdint>
#include <memory>
#include <optional>
#include <span>

#include "assembly/model_on_ranks.h"
#include "config/run_config.h"
#include "data/batch.h"
#include "objective/objective.h"
#include "train/auto_recompute.h"
#include "train/gradient_cosine.h"
#include "train/micro_batch.h"
#include "train/optimizer.h"
#include "train/queued_steps.h"
#include "train/router_replay.h"
#include "train/spike_policy.h"

namespace heddle::train {

/// A model with optimizer state, and what is done to it in a step. How a step runs is its own
/// affair: queued ahead on GPUs and recorded as graphs, measured and run again where memory does
/// not suffice, with optimizer state on the host, with experts recorded or replayed.
class Learner {
 public:
  /// The parts of `placed` and `objective` must outlive it. `most_tokens`: of the largest row or
  /// micro-batch.
  Learner(const config::RunConfig& config, assembly::ModelOnRanks& placed,
          objective::Objective& objective, std::int64_t most_tokens);

  /// Numbers of one step.
  struct StepOptions {
    std::int64_t step = 1;  ///< Number in the run, from 1: keys dropout and the record of experts.
    /// Factors of the gradients of the loss's sum and of the router's loss.
    double loss_scale = 1, auxiliary_scale = 0;
    double lr = 0;
  };

  /// Adds to the gradients those of the micro-batches of this data rank. Returns sums over all
  /// ranks.
  MicroBatchLoss forward_backward(std::span<const data::Batch> micro_batches,
                                  const StepOptions& options);
  /// Clips by the norm of the whole gradient, updates and clears the gradients; if the norm or
  /// `loss`, a number that tells of the step, is not finite, or the norm above
  /// spikes().threshold(), it changes nothing but clears them and, of a spike, counts the step.
  /// Returns the norm before clipping; `cosine`: gets GradientCosine's of the step.
  double optim_step(double lr, double loss, std::optional<double>* cosine = nullptr);

  using Outcome = QueuedSteps::Queued::Outcome;
  /// Both verbs, by the policies of the run. Where loss or norm are not finite nothing was updated.
  Outcome step(std::span<const data::Batch> micro_batches, const StepOptions& options);

  /// True if steps can be given to the device while it is at earlier ones.
  bool queues_ahead() const { return queued_ && !recompute_; }
  /// step() that does not wait; only if queues_ahead().
  QueuedSteps::Queued queue(std::span<const data::Batch> micro_batches, const StepOptions& options);
  /// Gives back memory of recorded graphs before another kind of work, if it may be needed.
  void release_graphs();

  Optimizer& optimizer() { return optimizer_; }
  const Optimizer& optimizer() const { return optimizer_; }
  /// Gets every step's norm from whoever awaits its outcome.
  SpikePolicy& spikes() { return spikes_; }
  /// Null unless train.recompute is auto.
  const AutoRecompute* recompute() const { return recompute_.get(); }
  /// Called once, before the first step after `done` others.
  void continue_after(std::int64_t done);

 private:
  Outcome run(std::span<const data::Batch> micro_batches, const StepOptions& options);
  /// Says once that pooled statistics depend on the cut into micro-batches.
  void warn_of_pooling(std::size_t micro_batches);

  assembly::ModelOnRanks& placed_;
  objective::Objective& objective_;
  double clip_norm_;
  objective::Neftune neftune_;
  Optimizer optimizer_;
  SpikePolicy spikes_;
  std::optional<GradientCosine> cosine_;      ///< With train.grad_cosine.
  std::unique_ptr<QueuedSteps> queued_;       ///< Null where the host is needed within a step.
  std::unique_ptr<AutoRecompute> recompute_;  ///< Null unless train.recompute is auto.
  bool pools_auxiliary_loss_;                 ///< train.router_aux_loss hf.
  std::optional<RouterReplay> router_;
  bool replays_experts_;  ///< Batches name the experts, or `router_` does.
  bool warned_of_pooling_ = false;
};

}  // namespace heddle::train
