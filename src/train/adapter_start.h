#pragma once

#include "config/run_config.h"

namespace heddle::train {

/// Gives a run with adapter.path the rank, alpha, rslora, targets, target_parameters and
/// modules_to_save of that adapter, and shared_expert_factors where its files have them so; the
/// tokenizer too, where the adapter has one and the user names none. Targets and modules that the
/// user names stay, since the run may train more of them. Does nothing without adapter.path. Throws
/// ConfigError for a setting that says otherwise than the adapter, ModelError for a folder that is
/// none and for what a run does not train (ckpt/trained_adapter.h).
void take_adapter_settings(config::RunConfig& config);

}  // namespace heddle::train
