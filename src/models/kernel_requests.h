#pragma once

#include <cstdint>
#include <vector>

#include "models/config.h"
#include "ops/registry.h"

namespace heddle::models {

/// How many ranks share the parts of a model.
struct Degrees {
  std::int64_t tp = 1;       ///< Heads and widths of each block.
  std::int64_t ulysses = 1;  ///< Heads of each further, while they mix tokens.
  std::int64_t ep = 1;       ///< Routed experts.
};

/// Tasks that a model is made for.
struct Duties {
  ops::Use use = ops::Use::kTraining;
  bool generates = false;         ///< It also decodes token by token.
  std::int64_t adapter_rank = 0;  ///< Rank of the adapters that it trains; 0: none.
  bool several_adapters = false;  ///< Rows of one pass may have different sets of adapters.
};

/// The operators that a model calls, with their dimensions on each rank; those that decode only if
/// it generates.
std::vector<ops::OpRequest> kernel_requests(const Config& config, const Degrees& degrees = {},
                                            const Duties& duties = {});

}  // namespace heddle::models
