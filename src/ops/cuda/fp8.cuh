// Values of a row as e4m3 with one scale.
#pragma once

#include <cuda_fp8.h>

#include <cstdint>

#include "ops/cuda/vector.cuh"

namespace heddle::ops::cuda {

/// The scale of a row whose largest magnitude this is: 448, the largest of e4m3, stands for it. At
/// least 2^-40, so that ratios of scales are finite.
__device__ __forceinline__ float fp8_scale(float largest) {
  return fmaxf(largest * (1.f / 448.f), 0x1p-40f);
}

__device__ __forceinline__ float warp_largest(float x) {
#pragma unroll
  for (int step = 16; step > 0; step /= 2) x = fmaxf(x, __shfl_xor_sync(0xffffffffu, x, step));
  return x;
}

__device__ __forceinline__ float largest_of(const Packed<bf16, 8>& packed) {
  float v[8], largest = 0.f;
  unpack<8, bf16>(packed, v);
#pragma unroll
  for (const float e : v) largest = fmaxf(largest, fabsf(e));
  return largest;
}

/// The largest over the CTA, in every thread; magnitudes. `scratch` holds 32 floats that nothing
/// else uses between two barriers.
__device__ __forceinline__ float block_largest(float x, float* scratch) {
  x = warp_largest(x);
  const int lane = threadIdx.x % 32, warps = (blockDim.x + 31) / 32;
  if (lane == 0) scratch[threadIdx.x / 32] = x;
  __syncthreads();
  return warp_largest(lane < warps ? scratch[lane] : 0.f);
}

/// Two values, the first in the low byte.
__device__ __forceinline__ uint32_t fp8_pair(float a, float b) {
  return __nv_cvt_float2_to_fp8x2(make_float2(a, b), __NV_SATFINITE, __NV_E4M3);
}

/// Eight values times `inverse`.
__device__ __forceinline__ uint2 fp8_of(const float (&v)[8], float inverse) {
  const auto pair = [&](int i) { return fp8_pair(v[i] * inverse, v[i + 1] * inverse); };
  return make_uint2(pair(0) | pair(2) << 16, pair(4) | pair(6) << 16);
}

}  // namespace heddle::ops::cuda
