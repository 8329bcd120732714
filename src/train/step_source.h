#pragma once

#include <functional>
#include <memory>
#include <optional>
#include <string>
#include <vector>

#include <nlohmann/json.hpp>

#include "ckpt/training_checkpoint.h"
#include "config/run_config.h"
#include "data/loader/loader.h"
#include "objective/objective.h"
#include "train/observer.h"
#include "train/setup.h"

namespace heddle::train {

/// Where a run's optimizer steps come from: files of rows, or what the model generates. Every rank
/// has one; all call it together.
class StepSource {
 public:
  virtual ~StepSource() = default;

  /// Numbers of an epoch that are not known beforehand are 0.
  virtual const data::LoaderInfo& info() const = 0;
  /// The rows in one line, for the start-up table.
  virtual std::string summary() const = 0;

  /// The next step, or nothing at the end of the run.
  virtual std::optional<data::Step> next() = 0;
  /// The place after the last step that next() returned, to be kept in a checkpoint. All ranks call
  /// it together.
  virtual nlohmann::json cursor() = 0;
  /// Continues from a cursor. Throws DataError where it does not fit.
  virtual void seek(const nlohmann::json& cursor) = 0;
  /// Whether step `step`, from 0, trains the model: if not its learning rate is 0.
  virtual bool trains(std::int64_t step) const { return true; }
  /// Whether the run may be evaluated, saved and stopped after the step that next() returned last;
  /// if not it goes on until it may.
  virtual bool may_pause() const { return true; }
  /// This rank's tensors, as live ones, that a checkpoint keeps besides the model's, see
  /// Optimizer::state, with those of the last cursor(); they are filled before seek().
  virtual std::vector<ckpt::TensorPart> state(bool with_copies) const { return {}; }
  /// Takes from a checkpoint, before seek(), tensors whose sizes it alone tells.
  virtual void load(const ckpt::TrainingCheckpoint& checkpoint) {}
  /// The weights are those after a step: adds what the source knows of it.
  virtual void on_updated(StepInfo& info) {}

  /// Whether evaluate() has anything to look at.
  virtual bool has_evaluation() const = 0;
  virtual Evaluation evaluate() = 0;
};

/// Objective and steps of a run.
struct Subject {
  std::unique_ptr<objective::Objective> objective;
  std::unique_ptr<StepSource> steps;
};
using MakeSubject = std::function<Subject(const config::RunConfig&, Setup&)>;

/// Rows of data.train and data.eval.
Subject dataset_subject(const config::RunConfig& config, Setup& setup);

}  // namespace heddle::train
