// Gradients of low-rank changes of linear layers. Plain C++, no ATen.
#pragma once

#include <vector>

#include "ops/cuda/element.h"

namespace heddle::ops::cuda {

/// Gradients of y += low b^T with low [rows, rank] and b [columns, rank]. bf16 unless said
/// otherwise, unit stride along rows; pointers and row strides of inputs are multiples of 16 bytes.
struct LowRankGradient {
  const void* dy = nullptr;  ///< [rows, columns]
  int64_t dy_stride = 0;
  int64_t columns = 0;
  const void* b = nullptr;
  int64_t b_stride = 0;
  const void* low = nullptr;
  int64_t low_stride = 0;
  void* d_low = nullptr;  ///< dy b, [rows, rank]
  int64_t d_low_stride = 0;
  float* d_b = nullptr;  ///< dy^T low, [columns, rank] contiguous
};

/// More gradients than this are not taken in one launch. A rank is a multiple of 8 up to the other.
constexpr int kMostLowRankGradients = 4, kMostLowRank = 32;

/// Floats of scratch that low_rank_gradients needs.
int64_t low_rank_workspace(int64_t rows, int64_t rank,
                           const std::vector<LowRankGradient>& gradients);

/// Reads each dy once for both of its gradients. Sums in fp32, no atomics. Needs a device of sm_90.
void low_rank_gradients(int64_t rows, int64_t rank, const std::vector<LowRankGradient>& gradients,
                        float* workspace, cudaStream_t stream);

}  // namespace heddle::ops::cuda
