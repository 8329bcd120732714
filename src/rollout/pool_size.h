#pragma once

#include <cstdint>
#include <optional>

#include "assembly/model_on_ranks.h"
#include "rollout/cache_pool.h"
#include "rollout/engine_options.h"

namespace heddle::rollout {

/// Sequences of a data rank that are generated at the same time.
std::int64_t rank_sequences(const assembly::ModelOnRanks& placed, const EngineOptions& options);

/// None: fp32 or wider.
std::optional<c10::ScalarType> stored_as(StateDtype dtype);

/// Pools of an engine, alike on all ranks, which call it together. Unless EngineOptions::pages is
/// given there are pages for all sequences at full length, or as many as memory_fraction of the
/// memory that is free now leaves after the slots, on the rank that has least of it. Throws
/// ConfigError for ranks that divide sequences (cp), for a kv_page that is no power of two, for
/// states of bfloat16 of a model without Gated DeltaNet layers, and where the pages do not hold one
/// sequence of full length.
CachePool::Size pool_size(const assembly::ModelOnRanks& placed, const EngineOptions& options);

}  // namespace heddle::rollout
