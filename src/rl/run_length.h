#pragma once

#include <cstdint>

#include "config/run_config.h"
#include "data/loader/loader.h"
#include "rl/prompts.h"

namespace heddle::rl {

/// How far a run was when it went on from a checkpoint.
struct Begun {
  std::int64_t steps = 0, groups = 0;  ///< Given and taken.
};

/// Steps of a whole run that has come so far: train.max_steps, or those that train.epochs leaves
/// with batches of rl.groups_per_step.
std::int64_t total_steps(const config::RunConfig& config, const Prompts& prompts,
                         const Begun& begun);

/// Numbers of a run that begins, as a loader of rows has them.
data::LoaderInfo loader_info(const config::RunConfig& config, const Prompts& prompts);

}  // namespace heddle::rl
