#include "train/loader_options.h"

#include <algorithm>
#include <cmath>

#include "base/errors.h"
#include "config/config.h"

namespace heddle::train {
namespace {

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

}  // namespace

std::unique_ptr<data::Loader> make_loader(const std::shared_ptr<const data::Dataset>& rows,
                                          const config::RunConfig& config, const comm::Mesh& mesh) {
  data::LoaderOptions options = loader_options(config, mesh);
  auto loader = std::make_unique<data::Loader>(rows, options);
  const double epochs = config.train.epochs;
  if (options.epochs == 0 || epochs == std::floor(epochs)) return loader;
  const auto steps = static_cast<std::int64_t>(
      std::ceil(epochs * static_cast<double>(loader->info().steps_per_epoch)));
  options.max_steps = options.max_steps > 0 ? std::min(options.max_steps, steps) : steps;
  return std::make_unique<data::Loader>(rows, options);
}

config::RunConfig paced(config::RunConfig config, const data::LoaderInfo& info) {
  const auto steps = [](double share, std::int64_t whole) {
    return std::max<std::int64_t>(1, std::llround(share * static_cast<double>(whole)));
  };
  if (config.optim.warmup_ratio > 0)
    config.optim.warmup_steps = steps(config.optim.warmup_ratio, info.total_steps);
  if (config.train.eval_every_epochs > 0)
    config.train.eval_every = steps(config.train.eval_every_epochs, info.steps_per_epoch);
  if (config.ckpt.every_epochs > 0)
    config.ckpt.every = steps(config.ckpt.every_epochs, info.steps_per_epoch);
  return config;
}

void check_schedule(const config::RunConfig& config, std::int64_t total_steps) {
  if (total_steps > 0 && config.log.profile_step > total_steps) {
    throw_error<ConfigError>("{}: {} is after the last of the {} steps of the run",
                             config::where(config, "log.profile_step"), config.log.profile_step,
                             total_steps);
  }
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
