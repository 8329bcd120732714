#pragma once

#include <cstdint>

#include "adapters/lora.h"
#include "models/model.h"

namespace heddle::assembly {

/// Bytes of the parameters of one rank: what tp, ep, pp and sharding leave of model and adapters.
struct RankMemory {
  std::int64_t parameters = 0;  ///< How many the rank holds something of; a number, not bytes.
  std::int64_t owned = 0;       ///< Rows that the rank updates and saves.
  std::int64_t resident = 0;    ///< Values that stay for the whole run: `owned` is among them.
  std::int64_t gathered = 0;    ///< The most that two successive units gather besides.
  std::int64_t gradients = 0;   ///< Of all that is trained, before they are summed over ranks.
};

/// Counts a model whose parameters were allocated or divided (parallel/sharding.h), between steps.
/// `adapters`: null for full training.
RankMemory rank_memory(models::Model& model, adapters::LoraSet* adapters);

}  // namespace heddle::assembly
