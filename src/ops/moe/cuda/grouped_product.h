// Products of rows that are sorted by expert with the matrix of each row's expert, by wgmma
// (Hopper). bf16, sums in fp32, no atomics. Plain C++, no ATen.
#pragma once

#include "ops/cuda/element.h"

namespace heddle::ops::cuda {

/// Whether this build has the kernel and the current device runs it.
bool grouped_product_available();

/// Most experts of a layer that it takes.
inline constexpr int kMostExperts = 512;

/// Scales of a product of e4m3 values. None: it is one of bf16.
struct EightBitProduct {
  const float* x_scales = nullptr;  ///< One for each row of x, or for each token.
  const int64_t* source =
      nullptr;  ///< [rows]: row n has the scale of token source[n] / k; null: its own.
  int64_t k = 1;
  const float* weight_scales = nullptr;  ///< [experts]
};

/// y[n] = W_e x[n] for the rows n of expert e, those from ends[e - 1] up to before ends[e].
struct GroupedProduct {
  const void* x;        ///< [rows, depth]
  const void* weight;   ///< [experts, width, depth]; with `depth_first` [experts, depth, width]
  void* y;              ///< [rows, width]
  const int32_t* ends;  ///< [experts] on the device, ascending, the last one at most `rows`.
  int64_t rows, depth, width, experts;
  bool depth_first = false;
  EightBitProduct eight_bit = {};
};

/// Tensors are contiguous and begin on 16 bytes, y bf16, x and weight bf16 or with scales e4m3;
/// depth is a multiple of 64, width of 8, in 8 bits twice these. Rows beyond the last end are not
/// written. Throws std::invalid_argument for other sizes.
void grouped_product(const GroupedProduct& product, cudaStream_t stream);

}  // namespace heddle::ops::cuda
