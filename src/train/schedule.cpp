#include "train/schedule.h"

#include <algorithm>
#include <cmath>
#include <numbers>

namespace heddle::train {

namespace {

/// Part of the range that a share `progress` of the final decay leaves, as get_wsd_schedule of
/// transformers.
double remaining(config::DecayType type, double progress) {
  switch (type) {
    case config::DecayType::kLinear:
      break;
    case config::DecayType::kCosine:
      return 0.5 * (1 + std::cos(std::numbers::pi * progress));
    case config::DecayType::kOneMinusSqrt:
      return 1 - std::sqrt(progress);
  }
  return 1 - progress;
}

}  // namespace

double learning_rate(const config::OptimSection& options, std::int64_t step, std::int64_t total) {
  if (step < options.warmup_steps) {
    return options.lr * static_cast<double>(step + 1) / static_cast<double>(options.warmup_steps);
  }
  // Progress 0 at the first step after the warm-up, 1 at the step after the last.
  const auto fraction = [&](std::int64_t begin) {
    const std::int64_t length = std::max<std::int64_t>(1, total - begin);
    return std::clamp(static_cast<double>(step - begin) / static_cast<double>(length), 0.0, 1.0);
  };
  double factor = 1;
  switch (options.schedule) {
    case config::Schedule::kConstant:
      break;
    case config::Schedule::kLinear:
      factor = 1 - fraction(options.warmup_steps);
      break;
    case config::Schedule::kCosine:
      factor = remaining(config::DecayType::kCosine, fraction(options.warmup_steps));
      break;
    case config::Schedule::kWsd: {
      const std::int64_t begin = std::max(options.warmup_steps, total - options.decay_steps);
      factor = step < begin ? 1 : remaining(options.decay_type, fraction(begin));
      break;
    }
  }
  return options.lr * (options.min_lr_ratio + (1 - options.min_lr_ratio) * factor);
}

Pause pause_behind(const config::RunConfig& config, bool has_eval, std::int64_t done,
                   std::int64_t total) {
  const auto is_due = [&](std::int64_t every) { return every > 0 && done % every == 0; };
  const std::int64_t profiled = config.log.profile_step;
  Pause pause;
  pause.is_last = done >= total;
  pause.evaluates = has_eval && (pause.is_last || is_due(config.train.eval_every));
  pause.saves = pause.is_last || is_due(config.ckpt.every);
  pause.profiles = profiled > 0 && (done == profiled || done + 1 == profiled);
  return pause;
}

}  // namespace heddle::train
