#pragma once

#include "ops/grouped_low_rank/grouped_low_rank.h"

namespace heddle::ops {

/// Fills builtin_registry() with the kernels that every build has.
void register_grouped_low_rank(Registry& registry);

namespace cuda {
/// And with those of CUDA devices.
void add_grouped_low_rank(Registry& registry);
}  // namespace cuda

namespace grouped_low_rank_reference {
/// Set by set, each product by libtorch.
GroupedLowRank::Functions functions();
}  // namespace grouped_low_rank_reference

}  // namespace heddle::ops
