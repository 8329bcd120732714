#pragma once

#include <cstdint>
#include <set>
#include <string>

#include "ckpt/training_checkpoint.h"
#include "config/run_config.h"

namespace heddle::train {

/// Whether train.resume names a checkpoint, where it names any; asked before a run writes anything.
/// Throws ConfigError that says what stands there instead and, of the folder of a run, its newest
/// checkpoint.
void check_resume(const config::RunConfig& config);

/// Throws ConfigError where a checkpoint of `before` holds other tensors than a run of `now` has,
/// because train.method differs; `step` is the checkpoint's.
void check_same_method(const config::RunConfig& before, const config::RunConfig& now,
                       std::int64_t step);

/// Throws ConfigError where the checkpoint's weights have another model.dtype.
void check_same_dtype(const config::RunConfig& before, const config::RunConfig& now,
                      std::int64_t step);

/// Throws ConfigError where the checkpoint's optimizer keeps other tensors for a weight: another
/// optim.name or optim.state_dtype, or momentum of sgd.
void check_same_optimizer(const config::RunConfig& before, const config::RunConfig& now,
                          std::int64_t step);

/// Throws ConfigError where it was another train.objective that the checkpoint's run learned, and
/// for models that are trained beside the policy since.
void check_same_objective(const config::RunConfig& before, const config::RunConfig& now,
                          std::int64_t step);

/// Throws ConfigError where the checkpoint lacks tensors of `of_run`, weights that its run did not
/// train.
void require_all_weights(const ckpt::TrainingCheckpoint& checkpoint,
                         const std::set<std::string>& of_run);

/// Throws ConfigError where the checkpoint holds learned values of tensors that are not among the
/// run's, which would be lost. `folder`: where their names begin, "weights/".
void require_no_other_weights(const ckpt::TrainingCheckpoint& checkpoint,
                              const std::set<std::string>& of_run, const std::string& folder);

}  // namespace heddle::train
