// Sums of products of the rows of a batch of sequences: plain C++, no ATen.
#pragma once

#include <cuda_runtime_api.h>

#include <vector>

#include "ops/linear/cuda/few_rows.h"

namespace heddle::ops::cuda {

constexpr int kMostBatchRows = 64;

/// Whether the device is one of compute capability 9.0 and this build has code for it.
bool batch_rows_available();

/// few_row_sums() of up to kMostBatchRows rows, for sums of one term whose columns are many.
/// `split`: CTAs that share the depth of a tile of columns, 1, 2, 4 or 8; `groups`: of 64 columns a
/// tile, 1 to 3 (gated: 2 or 3); 0: as the shape wants it.
/// A row's bits depend on neither the number of rows nor the other rows.
void batch_row_sums(int rows, const std::vector<FewRowSum>& sums, cudaStream_t stream,
                    const FewRowNorm& norm = {}, const FewRowSlots& slots = {}, int split = 0,
                    int groups = 0);

}  // namespace heddle::ops::cuda
