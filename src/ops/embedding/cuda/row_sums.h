// Sums of rows that share a number. Plain C++, no ATen.
#pragma once

#include "ops/cuda/element.h"

namespace heddle::ops::cuda {

struct RowSumsShape {
  int64_t count, width;  ///< Rows, and elements of each.
  Element row_type, sum_type;
};

/// Floats of scratch that row_sums needs.
int64_t row_sums_workspace(const RowSumsShape& shape);

/// sums[numbers[i]] += rows[order[i]] for all i. `numbers` [count] ascending; rows [count, width]
/// with unit stride over the width; sums contiguous. Each sum is made in fp32 in the order of
/// `numbers` and added once: no atomics, the same bits every time.
void row_sums(const RowSumsShape& shape, const int64_t* numbers, const int64_t* order,
              const void* rows, int64_t row_stride, void* sums, float* workspace,
              cudaStream_t stream);

}  // namespace heddle::ops::cuda
