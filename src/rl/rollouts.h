#pragma once

#include <memory>

#include "comm/world.h"
#include "config/run_config.h"

namespace heddle::rl {

/// The work of a rank that only generates: places the model in the layout of rollout.tp, meets the
/// trainer, and generates until it says that the run is over, or goes on without this rank. When
/// other rollouts are lost, those that are left place the model and meet the trainer anew. `job`
/// holds all rollout ranks. Throws as RemoteGeneration, and CommError when the trainer fails or
/// falls silent.
void run_rollouts(const config::RunConfig& config, const std::shared_ptr<comm::World>& job);

}  // namespace heddle::rl
