#pragma once

#include "base/named_enum.h"

namespace heddle::parallel {

/// When a unit's gradients are summed over the ranks: once a step, for which each rank keeps them
/// whole while it accumulates, or in every micro-batch, after which it keeps those of its owned
/// rows.
enum class Summing { kStep, kMicroBatch };
constexpr auto names_of(Summing) { return spelled("step", "micro_batch"); }

}  // namespace heddle::parallel
