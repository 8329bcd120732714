// A warp per row: the row's largest magnitude, then the row again, from the cache.
#include "ops/linear/cuda/fp8_rows.h"

#include <cuda_fp8.h>

#include <algorithm>

#include "ops/cuda/vector.cuh"

namespace heddle::ops::cuda {
namespace {

constexpr int kWarps = 8, kWidth = 8;
constexpr float kLargest = 448.f;  // of e4m3

__global__ void __launch_bounds__(kWarps * 32)
    fp8_rows_kernel(const bf16* x, int64_t rows, int64_t columns, int64_t stride, uint8_t* y,
                    float* scales) {
  const int64_t row = int64_t{blockIdx.x} * kWarps + threadIdx.x / 32;
  if (row >= rows) return;
  const bf16* source = x + row * stride;
  const int64_t first = (threadIdx.x & 31) * kWidth;
  float largest = 0.f;
#pragma unroll 4
  for (int64_t i = first; i < columns; i += 32 * kWidth) {
    float v[kWidth];
    unpack<kWidth, bf16>(load<kWidth>(source + i), v);
#pragma unroll
    for (const float e : v) largest = fmaxf(largest, fabsf(e));
  }
  for (int step = 16; step > 0; step /= 2)
    largest = fmaxf(largest, __shfl_xor_sync(0xffffffffu, largest, step));
  const float scale = largest > 0.f ? largest / kLargest : 1.f, inverse = 1.f / scale;
  if (first == 0) scales[row] = scale;
#pragma unroll 4
  for (int64_t i = first; i < columns; i += 32 * kWidth) {
    float v[kWidth];
    unpack<kWidth, bf16>(load<kWidth>(source + i), v);
    uint2 packed;
    uint32_t words[2];
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      const auto pair = [&](int j) {
        return uint32_t{__nv_cvt_float2_to_fp8x2(
            make_float2(v[4 * half + j] * inverse, v[4 * half + j + 1] * inverse), __NV_SATFINITE,
            __NV_E4M3)};
      };
      words[half] = pair(0) | pair(2) << 16;
    }
    packed = make_uint2(words[0], words[1]);
    *reinterpret_cast<uint2*>(y + row * columns + i) = packed;
  }
}

}  // namespace

void fp8_rows(const void* x, int64_t rows, int64_t columns, int64_t stride, void* y, float* scales,
              cudaStream_t stream) {
  if (rows == 0) return;
  const auto blocks = static_cast<unsigned>((rows + kWarps - 1) / kWarps);
  fp8_rows_kernel<<<blocks, kWarps * 32, 0, stream>>>(static_cast<const bf16*>(x), rows, columns,
                                                      stride, static_cast<uint8_t*>(y), scales);
  check_launch("fp8_rows");
}

}  // namespace heddle::ops::cuda
