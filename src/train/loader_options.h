#pragma once

#include <memory>

#include "comm/mesh.h"
#include "config/run_config.h"
#include "data/loader/loader.h"

namespace heddle::train {

/// Reads the rows of a run on this data rank. A part of an epoch ends it after as many steps.
std::unique_ptr<data::Loader> make_loader(const std::shared_ptr<const data::Dataset>& rows,
                                          const config::RunConfig& config, const comm::Mesh& mesh);

/// The configuration with what it gives in epochs and shares of the run as steps.
config::RunConfig paced(config::RunConfig config, const data::LoaderInfo& info);

/// Throws for warm-up and decay that exceed a run whose length its data give (config::check() knows
/// that of train.max_steps), and for a step to profile that it has not.
void check_schedule(const config::RunConfig& config, std::int64_t total_steps);

}  // namespace heddle::train
