// Rows of a bf16 matrix as 8-bit floats, each row with its own scale. Plain C++ header.
#pragma once

#include <cuda_runtime_api.h>

#include <cstdint>

namespace heddle::ops::cuda {

/// y [rows,columns] e4m3, contiguous, and scales [rows]: x is about scale * y, the largest of each
/// row is 448 in y. x has `stride` elements from row to row, which start on 16 bytes; `columns` is
/// a multiple of 8. Bytes: 2 read (once more from the cache), 1 written per element.
void fp8_rows(const void* x, int64_t rows, int64_t columns, int64_t stride, void* y, float* scales,
              cudaStream_t stream);

}  // namespace heddle::ops::cuda
