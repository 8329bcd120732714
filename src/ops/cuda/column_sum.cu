#include "ops/cuda/column_sum.h"

#include "ops/cuda/vector.cuh"

namespace heddle::ops::cuda {
namespace {

// 32 columns a CTA, so that a warp reads whole 128-byte lines; 32 warps share the rows.
constexpr int kColumns = 32, kRowGroups = 32;

__global__ void column_sum_kernel(const float* __restrict__ partial, int64_t rows, int64_t width,
                                  void* out, Element type) {
  __shared__ float sums[kRowGroups][kColumns];
  const int64_t column = static_cast<int64_t>(blockIdx.x) * kColumns + threadIdx.x;
  float sum = 0;
  if (column < width) {
#pragma unroll 4
    for (int64_t row = threadIdx.y; row < rows; row += kRowGroups) {
      sum += partial[row * width + column];
    }
  }
  sums[threadIdx.y][threadIdx.x] = sum;
  __syncthreads();
  if (threadIdx.y != 0 || column >= width) return;
  float total[1] = {0};
#pragma unroll
  for (int i = 0; i < kRowGroups; ++i) total[0] += sums[i][threadIdx.x];
  if (type == Element::kBFloat16) {
    write(static_cast<bf16*>(out) + column, total);
  } else {
    write(static_cast<float*>(out) + column, total);
  }
}

}  // namespace

void column_sum(const float* partial, int64_t rows, int64_t width, void* out, Element type,
                cudaStream_t stream) {
  if (width == 0) return;
  const auto blocks = static_cast<unsigned>((width + kColumns - 1) / kColumns);
  column_sum_kernel<<<blocks, dim3(kColumns, kRowGroups), 0, stream>>>(partial, rows, width, out,
                                                                       type);
  check_launch("column_sum");
}

}  // namespace heddle::ops::cuda
