#pragma once

#include "ops/grouped_low_rank/grouped_low_rank.h"

namespace heddle::ops {
void register_grouped_low_rank(Registry& registry);
namespace cuda {
void add_grouped_low_rank(Registry& registry);
}
}  // namespace heddle::ops

namespace heddle::ops::grouped_low_rank_reference {

/// Set by set, each product by libtorch.
GroupedLowRank::Functions functions();

}  // namespace heddle::ops::grouped_low_rank_reference
