#pragma once

#include "config/run_config.h"
#include "train/observer.h"
#include "train/optimizer.h"
#include "train/setup.h"

namespace heddle::train {

/// What the start-up table shows of model, memory, kernels and data.
RunInfo describe_setup(const Setup& setup, const config::RunConfig& config,
                       const Optimizer& optimizer);

/// Estimate of the bytes that one token leaves for the backward under a recomputation policy, all
/// layers together.
double activation_bytes_per_token(const models::qwen3_5::Config& config, std::int64_t element_bytes,
                                  config::Recompute recompute);

}  // namespace heddle::train
