#pragma once

#include "ops/grouped_low_rank/grouped_low_rank.h"

namespace heddle::ops {

namespace grouped_low_rank_reference {
/// Set by set, each product by libtorch.
GroupedLowRank::Functions functions();
}  // namespace grouped_low_rank_reference

}  // namespace heddle::ops
