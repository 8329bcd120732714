// CUDA kernels of low-rank changes under dropout: layers that share an input, of which the adapter
// of each sees its own elements. Plain C++ header, no ATen.
#pragma once

#include <cstdint>

#include "ops/cuda/element.h"

namespace heddle::ops::cuda {

/// Factors of one launch: at most so many, of a rank of 8, 16, 32 or 64 each, and of 64 together.
constexpr int kMostDroppedFactors = 4, kMostDroppedRanks = 64;
/// Columns of one tile.
constexpr int kDroppedColumns = 64;

/// Element (t, c) is dropped for factor f if bits 16 (c' mod 4) and up of splitmix64 of keys[f],
/// draws[t] and c' / 4, with c' = features[c], are below `threshold`. Features come in runs of 8
/// consecutive ones from multiples of 8. bf16, unit stride along rows; pointers and row strides are
/// multiples of 16 bytes.
struct DroppedShape {
  int64_t rows = 0, width = 0;  ///< The width is a multiple of kDroppedColumns.
  int factors = 0, rank = 0;
  uint64_t keys[kMostDroppedFactors] = {};
  uint32_t threshold = 0;             ///< Threshold of 16 bits, not 0.
  float kept = 1;                     ///< Factor of elements that are not dropped.
  const int64_t* draws = nullptr;     ///< [rows]
  const int64_t* features = nullptr;  ///< [width]
};

// In what follows a [factors * rank, width] holds the factors one below the other, and
// low [rows, factors * rank] what belongs to them side by side. Sums in fp32, no atomics.

/// low = x a^T, x [rows, width] as each factor sees it. Reads x once.
void dropped_low(const DroppedShape& shape, const void* x, int64_t x_stride, const void* a,
                 int64_t a_stride, void* low, int64_t low_stride, cudaStream_t stream);

/// d_a = low^T x, fp32 [factors * rank, width] contiguous. Reads x once.
int64_t dropped_gradient_workspace(const DroppedShape& shape);
void dropped_gradient(const DroppedShape& shape, const void* x, int64_t x_stride, const void* low,
                      int64_t low_stride, float* d_a, float* workspace, cudaStream_t stream);

/// dx [rows, width] += low a, of each factor what it sees; rounded once. `a_turned` is a
/// transposed, [width, factors * rank] with row stride `a_stride`.
void add_dropped(const DroppedShape& shape, void* dx, int64_t dx_stride, const void* low,
                 int64_t low_stride, const void* a_turned, int64_t a_stride, cudaStream_t stream);

}  // namespace heddle::ops::cuda
