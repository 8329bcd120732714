#pragma once

#include <cstdint>

#include "rollout/cache_options.h"

namespace heddle::rollout {

struct EngineOptions {
  std::int64_t max_sequences = 16;     ///< Generated at the same time.
  std::int64_t prefill_tokens = 4096;  ///< Prompt tokens of one pass on each data rank, at most.
  std::int64_t capacity = 4096;        ///< Tokens of a sequence, prompt and output, at most.
  /// A request whose logits are not finite ends with Progress::failure and the others go on, as
  /// where they are strangers with adapters of their own; else step() throws.
  bool tells_failures = false;
  bool record_steps = true;  ///< Steps become graphs where RecordedDecoding can.
  /// The model's own adapters are added to its matrices (MergedAdapter) for as long as the engine
  /// holds its weights: from a step to release_weights().
  bool merge_adapter = false;
  /// Ranks that divide the weights (fsdp) gather all of them for as long as the engine holds them,
  /// in place of each layer for each pass.
  bool gather_weights = false;
  CacheOptions caches = {};
  /// Pages of each data rank; 0: see pool_size(). With fewer than all sequences want at full length
  /// one may be interrupted and go on later.
  std::int64_t pages = 0;
  /// Slots of each data rank besides those of sequences, for states that are kept for later prompts
  /// (see Request::keep_state) and turns, and of groups of samples for which there is no room at
  /// once. More than this give way to pages (pool_size()).
  std::int64_t kept_states = 4;
};

}  // namespace heddle::rollout
