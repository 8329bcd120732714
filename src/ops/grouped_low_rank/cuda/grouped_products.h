// Products of many matrices with narrow ones in one launch: the low-rank changes of rows that
// belong to several sets of adapters. bf16, sums in fp32, no atomics. Plain C++, no ATen.
#pragma once

#include <cstdint>
#include <vector>

#include "ops/cuda/element.h"

namespace heddle::ops::cuda {

/// The ways to read the factors of a product [m,k] x [k,n] with a narrow n.
enum class NarrowForm {
  kRows,       ///< tall [m,k], narrow [n,k]: x a^T
  kDeep,       ///< tall [m,k], narrow [k,n]: dy b
  kGradients,  ///< tall [k,m], narrow [k,n]: dy^T low, or x^T d_low
};

/// One product. Matrices have unit stride along their rows; `tall`, its stride and the narrow one
/// of kGradients are multiples of 16 bytes, other narrow matrices may begin and end anywhere.
struct NarrowProduct {
  const void* tall = nullptr;
  const void* narrow = nullptr;
  /// bf16 [m,n rounded up to 8] on 16 bytes, the rest zeros. For kGradients fp32 [m,n], or [n,m] if
  /// `turned`.
  void* out = nullptr;
  int64_t tall_stride = 0, narrow_stride = 0, out_stride = 0;
  int32_t m = 0, k = 0, n = 0;
  float scale = 1;
  bool turned = false;       ///< kGradients alone.
  bool accumulates = false;  ///< The gradient is added to what is there.
  /// kDeep alone, up to kMostRowsOfBoth rows: tall^T low, contiguous fp32 [k,n], from the same
  /// reading of `tall`. Null: not asked for. `low` is [m,n], as `out` is.
  float* gradient = nullptr;
  const void* low = nullptr;
  int64_t low_stride = 0;
};
constexpr int64_t kMostRowsOfBoth = 128;

/// All products, each summed in an order that its own sizes and the number of parts decide. Throws
/// std::runtime_error where a launch fails. Needs a device of compute capability 9.0 or later.
void narrow_products(NarrowForm form, const std::vector<NarrowProduct>& products,
                     cudaStream_t stream);

/// One term of a sum: a [m,k], 16-byte rows, times b: [n,k], or [k,n] where `b_has_depth_first`
/// (16-byte rows then).
struct WideTerm {
  const void* a = nullptr;
  const void* b = nullptr;
  int64_t a_stride = 0, b_stride = 0;
  int32_t k = 0;
};

/// y [m,n] += the sum of a b over the terms; rows of 16 bytes, n a multiple of 8.
struct WideSum {
  void* y = nullptr;
  int64_t y_stride = 0;
  int32_t m = 0, n = 0;
  std::vector<WideTerm> terms;  ///< Up to kMostWideTerms.
};
constexpr int kMostWideTerms = 8;

void wide_sums(bool b_has_depth_first, const std::vector<WideSum>& sums, cudaStream_t stream);

}  // namespace heddle::ops::cuda
