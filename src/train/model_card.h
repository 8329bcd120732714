#pragma once

#include <string>

#include "assembly/model_on_ranks.h"
#include "config/run_config.h"

namespace heddle::train {

/// README.md of a run's result: what it was made from, how, and how Python loads it, with the
/// metadata that the Hugging Face Hub reads.
std::string model_card(const config::RunConfig& config, const assembly::ModelOnRanks& placed,
                       bool is_adapter);

}  // namespace heddle::train
