#pragma once

#include "assembly/model_on_ranks.h"
#include "config/run_config.h"
#include "sync/part.h"

namespace heddle::rl {

/// Visits what a trainer gives to rollouts, in one order on all ranks: the adapters and what is
/// trained beside them, or without adapters the whole model.
sync::Visit published(const config::RunConfig& config, const assembly::ModelOnRanks& model);

}  // namespace heddle::rl
