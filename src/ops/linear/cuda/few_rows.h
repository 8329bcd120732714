// Sums of products of a few rows: plain C++, no ATen.
#pragma once

#include <cuda_runtime_api.h>

#include <cstdint>
#include <vector>

#include "ops/cuda/element.h"

namespace heddle::ops::cuda {

constexpr int kMostFewRows = 16, kMostFewRowSums = 6, kMostFewRowTerms = 2;

/// a [rows,depth] and b [columns,depth], bf16; rows begin on 16 bytes and depth is a multiple of 8.
struct FewRowTerm {
  const void *a = nullptr, *b = nullptr;
  int64_t a_stride = 0, b_stride = 0;
  int depth = 0;
};

/// A low-rank change of a sum's first term: + low b^T. low [rows,rank], b [columns,rank], as in a
/// term; made by the launch before, see FewRowOrder.
struct FewRowChange {
  const void *low = nullptr, *b = nullptr;
  int64_t low_stride = 0, b_stride = 0;
  int rank = 0;  ///< 0: no change.
};

/// y [rows,columns] = start + scale times the sum of a b^T over the terms, bf16, summed in fp32.
/// With `up`: y = silu(s) * u, where s is that sum and u the sum with `up` in the place of the
/// first term's b, both rounded to bf16; one term.
struct FewRowSum {
  FewRowTerm terms[kMostFewRowTerms];
  int term_count = 0, columns = 0;
  float scale = 1;  ///< Multiplies the sum over the terms.
  void* y = nullptr;
  const void* start = nullptr;  ///< May be null: zero. May be y.
  int64_t y_stride = 0, start_stride = 0;
  const void* up = nullptr;  ///< Laid out like the first term's b; null: see above.
  FewRowChange change, up_change;
};

/// An RMS norm of the rows of all sums' first terms, which are the same: a is rms_norm(x) of the
/// given rows x, with the scale offset + weight.
struct FewRowNorm {
  const void* weight = nullptr;  ///< [depth]; null: no norm.
  Element weight_type = Element::kBFloat16;
  float offset = 0, eps = 0;
};

/// Launches that read the same rows: the second runs beside the first and waits for it only where
/// it needs the first one's results, its changes.
enum class FewRowOrder { kAlone, kFirstOfTwo, kSecondOfTwo };

/// All sums in one launch: 1 to kMostFewRowSums sums.
void few_row_sums(int rows, const std::vector<FewRowSum>& sums, cudaStream_t stream,
                  const FewRowNorm& norm = {}, FewRowOrder order = FewRowOrder::kAlone);

}  // namespace heddle::ops::cuda
