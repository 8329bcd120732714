#pragma once

#include "ops/cuda/element.h"

namespace heddle::ops::cuda {

/// out[c] = sum over r of partial[r, c], in a fixed order: the second stage of a weight's gradient,
/// whose first stage leaves one row per CTA. partial fp32 [rows, width], contiguous.
void column_sum(const float* partial, int64_t rows, int64_t width, void* out, Element type,
                cudaStream_t stream);

}  // namespace heddle::ops::cuda
