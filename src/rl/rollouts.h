#pragma once

#include <atomic>
#include <memory>

#include "comm/world.h"
#include "config/run_config.h"
#include "data/tokenizer/tokenizer.h"
#include "rl/prompts.h"

namespace heddle::rl {

struct RolloutData {
  std::shared_ptr<const data::Tokenizer> tokenizer;
  std::unique_ptr<const Prompts> prompts;
};
/// Throws as train::load_tokenizer() and Prompts.
RolloutData rollout_data(const config::RunConfig& config);

/// The work of a rank that only generates: places the model in the layout of rollout.tp, meets the
/// trainer, and generates until it says that the run is over, or goes on without this rank. When
/// other rollouts are lost, those that are left place the model and meet the trainer anew. `job`
/// holds all rollout ranks. `stop` is looked at by rank 0 and may be null; false: it asked. Throws
/// as RemoteGeneration, and CommError when the trainer fails or falls silent.
bool run_rollouts(const config::RunConfig& config, const std::shared_ptr<comm::World>& job,
                  const RolloutData& data, const std::atomic<bool>* stop = nullptr);

}  // namespace heddle::rl
