// Sums of matrix products in one pass: plain C++, no ATen.
#pragma once

#include <cuda_runtime_api.h>

#include <cstdint>
#include <vector>

namespace heddle::ops::cuda {

/// One product of a sum. Both matrices are bf16 with unit stride along their rows; pointers and row
/// strides are multiples of 16 bytes.
struct ProductTerm {
  const void* a = nullptr;  ///< [rows, depth]
  int64_t a_stride = 0;
  const void* b = nullptr;  ///< [columns, depth], or [depth, columns] in the transposed form
  int64_t b_stride = 0;
  int64_t depth = 0;
  /// Rows of the sum that the term is for, which `a` begins with: [term_rows, depth]. 0: all of
  /// them.
  int64_t first_row = 0, term_rows = 0;
  /// Unless null, both matrices are e4m3 with a scale for each of their rows (fp8_rows.h), b is
  /// [columns, depth] in either form, the depth a multiple of 16 and the sum wider than 64.
  const float* a_scales = nullptr;
  const float* b_scales = nullptr;

  bool is_eight_bit() const { return a_scales != nullptr; }
};

/// y [rows, columns] = the sum over terms of a b^T (a b in the transposed form), summed in fp32 and
/// rounded once.
struct ProductSum {
  void* y = nullptr;
  int64_t y_stride = 0;
  int64_t columns = 0;
  /// [rows, columns] that the sum begins with, laid out as the terms' matrices, or null; for all
  /// sums of a launch or for none, and not in the transposed form.
  const void* start = nullptr;
  int64_t start_stride = 0;
  std::vector<ProductTerm> terms;
};

/// At most this many sums, and this many terms of all of them, in one launch.
constexpr int kMostProductSums = 4;
constexpr int kMostProductTerms = 44;

/// Whether the current device is of compute capability 9.0 and this build has code for it.
bool product_sums_available();

/// All sums, of `rows` rows each, in one launch on a device of sm_90. Throws std::runtime_error
/// where tensor maps cannot be made or the launch fails.
void product_sums(int64_t rows, const std::vector<ProductSum>& sums, bool b_has_depth_first,
                  cudaStream_t stream);

}  // namespace heddle::ops::cuda
