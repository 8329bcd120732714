#pragma once

#include <cstdint>

#include "config/run_config.h"

namespace heddle::train {

/// Learning rate of optimizer step `step` (from 0) of `total` steps: linear warm-up over
/// warmup_steps (the first step already has lr / warmup_steps), then constant, linear or cosine
/// down to min_lr_ratio x lr at the last step, or "wsd": constant, then down over the last
/// decay_steps in the form of decay_type.
double learning_rate(const config::OptimSection& options, std::int64_t step, std::int64_t total);

/// Work of a run between an optimizer step and the next one, with the weights as they then are.
struct Pause {
  bool is_last = false, evaluates = false, saves = false;
  bool profiles = false;  ///< Either of the two steps is timed by itself.

  Pause& operator|=(const Pause& other) {
    is_last |= other.is_last;
    evaluates |= other.evaluates;
    saves |= other.saves;
    profiles |= other.profiles;
    return *this;
  }
  bool any() const { return is_last || evaluates || saves || profiles; }
};

/// Behind `done` of `total` steps; `has_eval`: there is data.eval. A best evaluation is saved too.
Pause pause_behind(const config::RunConfig& config, bool has_eval, std::int64_t done,
                   std::int64_t total);

}  // namespace heddle::train
