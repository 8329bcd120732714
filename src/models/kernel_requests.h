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

/// Which operators the model calls, and with which dimensions on each rank; those that decode if it
/// `generates`.
std::vector<ops::OpRequest> kernel_requests(const Config& config, const Degrees& degrees = {},
                                            bool generates = false);

}  // namespace heddle::models
