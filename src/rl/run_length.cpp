#include "rl/run_length.h"

#include <algorithm>

namespace heddle::rl {
namespace {

/// Steps of so many groups. Batches are whole numbers of steps, but for the last.
std::int64_t steps_for(const config::RunConfig& config, std::int64_t groups) {
  const std::int64_t size = config.rl.groups_per_step;
  return (groups + size - 1) / size * config.rl.epochs;
}

}  // namespace

std::int64_t total_steps(const config::RunConfig& config, const Prompts& prompts,
                         const Begun& begun) {
  if (config.train.max_steps > 0) return config.train.max_steps;
  const std::int64_t all = prompts.per_epoch() * config.train.epochs;
  return begun.steps + steps_for(config, std::max<std::int64_t>(all - begun.groups, 0));
}

data::LoaderInfo loader_info(const config::RunConfig& config, const Prompts& prompts) {
  data::LoaderInfo info;
  info.sequences_per_epoch = prompts.per_epoch() * config.rl.samples_per_group;
  info.rows_per_epoch = info.sequences_per_epoch;
  info.tokens_per_epoch = prompts.tokens();
  info.steps_per_epoch = steps_for(config, prompts.per_epoch());
  info.total_steps = total_steps(config, prompts, {});
  info.mean_row_tokens = static_cast<double>(config.data.max_length);
  return info;
}

}  // namespace heddle::rl
