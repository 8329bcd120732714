#pragma once

#include "config/run_config.h"
#include "train/setup.h"

namespace heddle::train {

/// Marks what the configuration trains and fills trainable and saved_whole, once model and adapters
/// are there. Throws ConfigError for a name that matches nothing, a module that has an adapter and
/// is to be saved whole, and if nothing is trained.
void choose_trainable(const config::RunConfig& config, Setup& setup);

}  // namespace heddle::train
