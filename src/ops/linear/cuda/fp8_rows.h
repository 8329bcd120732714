// Matrices of bf16 as 8-bit floats, each row of the result with its own scale. Plain C++ header.
#pragma once

#include <cuda_runtime_api.h>

#include <cstdint>

namespace heddle::ops::cuda {

/// y [rows,columns] e4m3, contiguous, and scales [rows]: x is about scale * y, the largest of each
/// row is 448 in y. A scale is at least 2^-40, so that ratios of scales are finite. x has `stride`
/// elements from row to row, which start on 16 bytes; `columns` is a multiple of 8. Bytes: 2 read,
/// 1 written per element.
void fp8_rows(const void* x, int64_t rows, int64_t columns, int64_t stride, void* y, float* scales,
              cudaStream_t stream);

/// Converts the transpose: y [columns,rows] and scales [columns]; `rows` is a multiple of 4.
/// `largest` [columns] is scratch. Bytes: 4 read, half of them from the cache where x fits into
/// it, and 1 written per element.
void fp8_columns(const void* x, int64_t rows, int64_t columns, int64_t stride, void* y,
                 float* scales, float* largest, cudaStream_t stream);

}  // namespace heddle::ops::cuda
