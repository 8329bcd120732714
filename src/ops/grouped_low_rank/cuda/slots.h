// Tables on the device that say which rows have which set's low-rank change: plain C++, no ATen.
#pragma once

#include <cstdint>

namespace heddle::ops::cuda {

/// The factors that a set has for one layer: a [rank,k] and b [n,rank], bf16, contiguous, beginning
/// on 16 bytes. Rank 0: the set leaves the layer as it is.
struct SlotFactors {
  const void *a, *b;
  int32_t rank;
  float scale;
};
static_assert(sizeof(SlotFactors) == 24);  // three int64 of LowRankSlots::layers

/// Consecutive rows of one set; slot -1: of the base model.
struct SlotRun {
  int32_t slot, first, rows, unused;
};
constexpr int kMostSlotRows = 8;  ///< Rows of a run.

}  // namespace heddle::ops::cuda
