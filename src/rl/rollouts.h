#pragma once

#include <memory>

#include "comm/world.h"
#include "config/run_config.h"

namespace heddle::rl {

/// The work of a rank that only generates: places the model in the layout of rollout.tp, meets the
/// trainer, and generates until it says that the run is over. `world` holds the rollout ranks.
/// Throws as RemoteGeneration, and CommError when the trainer fails or falls silent.
void run_rollouts(const config::RunConfig& config, const std::shared_ptr<comm::World>& world);

}  // namespace heddle::rl
