// Products of rows that are sorted by expert with the matrix of each row's expert, by wgmma
// (Hopper). bf16, sums in fp32, no atomics. Plain C++, no ATen.
#pragma once

#include "ops/cuda/element.h"

namespace heddle::ops::cuda {

/// Whether this build has the kernel and the current device runs it.
bool grouped_product_available();

/// Most experts of a layer that it takes.
inline constexpr int kMostExperts = 512;

/// y[n] = W_e x[n] for the rows n of expert e, those from ends[e - 1] up to before ends[e].
struct GroupedProduct {
  const void* x;        ///< [rows, depth]
  const void* weight;   ///< [experts, width, depth]; with `depth_first` [experts, depth, width]
  void* y;              ///< [rows, width]
  const int32_t* ends;  ///< [experts] on the device, ascending, the last one at most `rows`.
  int64_t rows, depth, width, experts;
  bool depth_first = false;
};

/// Tensors are contiguous, bf16 and begin on 16 bytes; depth is a multiple of 64, width of 8. Rows
/// beyond the last end are not written. Throws std::invalid_argument for other sizes.
void grouped_product(const GroupedProduct& product, cudaStream_t stream);

}  // namespace heddle::ops::cuda
