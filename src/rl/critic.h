#pragma once

#include <cstdint>
#include <memory>
#include <optional>
#include <vector>

#include "assembly/model_on_ranks.h"
#include "ckpt/training_checkpoint.h"
#include "config/run_config.h"
#include "objective/value.h"
#include "rl/experience.h"
#include "train/learner.h"
#include "train/setup.h"
#include "train/untrained.h"

namespace heddle::rl {

/// Values of tokens for advantage gae: a second model in the policy's layout, which starts as a
/// copy of the files that the policy starts from, with a head of one number, and with an optimizer
/// of its own (rl.critic). With LoRA it has adapters of its own on the frozen copy. All ranks call
/// it together.
class Critic {
 public:
  /// `steps`: of the whole run, for the schedule of the learning rate.
  Critic(const config::RunConfig& config, const train::Setup& setup, std::int64_t steps);

  /// Gives the experience its values.
  void evaluate(const data::Step& step, Experience& experience) const;
  /// Updates towards the returns of the step. Throws Error, before an update, where its loss or
  /// gradient is not finite.
  void learn(const data::Step& step, const Experience& experience);
  /// Adds what the updates of the last step reported.
  void report(train::StepInfo& info) const;

  /// See train::StepSource::state.
  std::vector<ckpt::TensorPart> state(bool with_copies) const;
  std::int64_t updates() const { return learner_.optimizer().steps(); }
  /// Goes on after `updates` others, from tensors that state() named.
  void restored(std::int64_t updates);
  /// Steps of the whole run, where a checkpoint leaves another number than a start does.
  void set_total_steps(std::int64_t steps) { steps_ = steps; }

 private:
  config::RunConfig config_;  ///< The run's, as the critic reads it.
  std::int64_t steps_;
  assembly::ModelOnRanks placed_;
  objective::Value objective_;
  train::Learner learner_;
  train::UntrainedWatch untrained_;
  Metrics last_;  ///< See report().
};

}  // namespace heddle::rl
