// The order of assignments by expert, ties in the order of assignments: a counting sort of three
// launches, in integers and without atomics beyond a CTA, so that it is the same each time. Plain
// C++, no ATen.
#pragma once

#include "ops/cuda/element.h"

namespace heddle::ops::cuda {

/// Assignments that one warp counts and places.
inline constexpr int64_t kOrderSegment = 512;
/// Most experts that it takes.
inline constexpr int64_t kMostOrderedExperts = 1024;

/// Segments of `count` assignments: rows of `counts`.
inline int64_t order_segments(int64_t count) { return (count + kOrderSegment - 1) / kOrderSegment; }

/// experts [count] int64 in [0, expert_count], where expert_count is no expert and comes last.
/// source [count]: the assignment at each sorted place; place [count]: its inverse; ends
/// [expert_count]: where the rows of each expert end; counts [segments, expert_count + 1]: scratch.
/// Throws std::invalid_argument for too many experts.
void expert_order(int64_t count, int64_t expert_count, const int64_t* experts, int64_t* source,
                  int64_t* place, int32_t* ends, int32_t* counts, cudaStream_t stream);

}  // namespace heddle::ops::cuda
