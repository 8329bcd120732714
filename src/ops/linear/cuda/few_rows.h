// Sums of products of a few rows: plain C++, no ATen.
#pragma once

#include <cuda_runtime_api.h>

#include <cstdint>
#include <vector>

#include "ops/cuda/element.h"
#include "ops/grouped_low_rank/cuda/slots.h"

namespace heddle::ops::cuda {

constexpr int kMostFewRows = 16, kMostFewRowSums = 6, kMostFewRowTerms = 2;

/// a [rows,depth] and b [columns,depth], bf16; rows begin on 16 bytes and depth is a multiple of 8.
struct FewRowTerm {
  const void *a = nullptr, *b = nullptr;
  int64_t a_stride = 0, b_stride = 0;
  int depth = 0;
};

/// A low-rank change of a sum's first term: + low b^T with low = scale a A^T, where a are the
/// term's rows, normed as the term's. A [rank,depth], b [columns,rank], as in a term.
struct FewRowChange {
  const void *a = nullptr, *b = nullptr;
  int64_t a_stride = 0, b_stride = 0;
  int rank = 0;  ///< 0: no change, unless there are slots.
  float scale = 1;
  /// A, b, rank and scale of each row's set, found by FewRowSlots; null: all rows have the ones
  /// above.
  const SlotFactors* slots = nullptr;
  void* low = nullptr;  ///< [rows,rank], written; rows of 16 bytes, ranks rounded up to 16.
  int64_t low_stride = 0;
};

/// The rows that have changes from slots; null: none.
struct FewRowSlots {
  const SlotRun* runs = nullptr;
  int count = 0;
  int rank = 0;  ///< No less than any set's, a multiple of 16.
  int sets = 0;  ///< Slots of each change, or 0, unknown: batch_rows finds these a little later.
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

/// All sums in one launch: 1 to kMostFewRowSums sums.
void few_row_sums(int rows, const std::vector<FewRowSum>& sums, cudaStream_t stream,
                  const FewRowNorm& norm = {}, const FewRowSlots& slots = {});

}  // namespace heddle::ops::cuda
