#include "train/loader_options.h"

#include <cmath>

#include "base/errors.h"
#include "config/config.h"

namespace heddle::train {

data::LoaderOptions loader_options(const config::RunConfig& config, const comm::Mesh& mesh) {
  data::LoaderOptions options;
  options.global_batch_size = config.train.global_batch_size;
  options.micro_batch_tokens = config.train.micro_batch_tokens;
  options.packing = config.data.packing;
  options.max_length = config.data.max_length;
  options.shuffle = config.data.shuffle;
  options.seed = config.train.seed;
  // A number of steps may need more epochs than the default one.
  options.epochs = config.train.max_steps > 0 && !config.is_set("train.epochs")
                       ? 0
                       : static_cast<std::int64_t>(std::ceil(config.train.epochs));
  options.max_steps = config.train.max_steps;
  options.rank = static_cast<int>(mesh.data_rank());
  options.world = static_cast<int>(mesh.data_size());
  return options;
}

void check_schedule(const config::RunConfig& config, std::int64_t total_steps) {
  const config::OptimSection& optim = config.optim;
  const bool is_wsd = optim.schedule == config::Schedule::kWsd;
  const std::int64_t decay = is_wsd ? optim.decay_steps : 0;
  if (total_steps == 0 || optim.warmup_steps + decay <= total_steps) return;
  const char* const key = optim.warmup_steps > 0 ? "optim.warmup_steps" : "optim.decay_steps";
  throw_error<ConfigError>(
      "{}: warm-up {} and decay {} steps are more than the {} steps of the run",
      config::where(config, key), optim.warmup_steps, decay, total_steps);
}

}  // namespace heddle::train
