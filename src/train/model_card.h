#pragma once

#include <string>

#include "config/run_config.h"
#include "train/setup.h"

namespace heddle::train {

/// README.md of a run's result: what it was made from, how, and how Python loads it, with the
/// metadata that the Hugging Face Hub reads.
std::string model_card(const config::RunConfig& config, const Setup& setup);

}  // namespace heddle::train
