#pragma once

#include "comm/mesh.h"
#include "config/run_config.h"
#include "data/loader/loader.h"

namespace heddle::train {

/// How a run reads its rows, on this data rank.
data::LoaderOptions loader_options(const config::RunConfig& config, const comm::Mesh& mesh);

/// Throws for warm-up and decay that exceed a run whose length its data give; config::check() knows
/// that of train.max_steps.
void check_schedule(const config::RunConfig& config, std::int64_t total_steps);

}  // namespace heddle::train
