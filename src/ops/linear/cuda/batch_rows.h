// Sums of products of the rows of a batch of sequences: plain C++, no ATen.
#pragma once

#include <cuda_runtime_api.h>

#include <vector>

#include "ops/linear/cuda/few_rows.h"

namespace heddle::ops::cuda {

constexpr int kMostBatchRows = 64, kMostBatchRowParts = 8;

/// Whether the device is one of compute capability 9.0 and this build has code for it.
bool batch_rows_available();

/// Whether batch_row_sums() takes less time than few_row_sums(), by the bytes of the matrices and
/// whether there are low-rank changes.
bool batch_rows_are_faster(int rows, const std::vector<FewRowSum>& sums, bool has_changes);

/// few_row_sums() of up to kMostBatchRows rows, for sums of one term whose columns are many.
/// A row's bits depend on neither the number of rows nor the other rows.
void batch_row_sums(int rows, const std::vector<FewRowSum>& sums, cudaStream_t stream,
                    const FewRowNorm& norm = {}, const FewRowSlots& slots = {});

}  // namespace heddle::ops::cuda
