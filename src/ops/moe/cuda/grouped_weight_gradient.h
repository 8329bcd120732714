// Gradients of each expert's matrix from rows that are sorted by expert, by wgmma (Hopper). bf16,
// sums in fp32, no atomics. Plain C++, no ATen.
#pragma once

#include "ops/cuda/element.h"

namespace heddle::ops::cuda {

/// dw_e = sum of dy[n]^T x[n] over the rows n of expert e, those from ends[e - 1] up to before
/// ends[e]; zeros for an expert without rows.
struct GroupedWeightGradient {
  const void* dy;       ///< [rows, out]
  const void* x;        ///< [rows, in]
  void* dw;             ///< [experts, out, in]
  const int32_t* ends;  ///< [experts] on the device, ascending, the last one at most `rows`.
  int64_t rows, out, in, experts;
};

/// Runs where grouped_product_available() says so. Tensors are bf16, contiguous and begin on 16
/// bytes; out and in are multiples of 64, experts at most kMostExperts. Rows beyond the last end
/// may hold anything. Throws std::invalid_argument for other sizes.
void grouped_weight_gradient(const GroupedWeightGradient& gradient, cudaStream_t stream);

}  // namespace heddle::ops::cuda
