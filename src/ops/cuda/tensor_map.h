#pragma once

#include <cuda.h>

#include <cstdint>

namespace heddle::ops::cuda {

/// For bulk copies of boxes [box_rows, 64] of a bf16 matrix with the 128-byte swizzle; what lies
/// beyond its rows and width is read as zeros and not written. The pointer and `stride`, in
/// elements, are multiples of 16 bytes. Throws std::runtime_error.
CUtensorMap tensor_map(const void* data, int64_t rows, int64_t width, int64_t stride, int box_rows);

}  // namespace heddle::ops::cuda
