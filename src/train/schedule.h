#pragma once

#include <cstdint>

#include "config/run_config.h"

namespace heddle::train {

/// Learning rate of optimizer step `step` (from 0) of `total` steps: linear warm-up over
/// warmup_steps (the first step already has lr / warmup_steps), then constant, linear or cosine
/// down to min_lr_ratio x lr at the last step, or "wsd": constant, then linear over the last
/// decay_steps.
double learning_rate(const config::OptimSection& options, std::int64_t step, std::int64_t total);

}  // namespace heddle::train
