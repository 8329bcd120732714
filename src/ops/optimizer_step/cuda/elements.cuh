// Elements that kernels of AdamW move: 8 of fp32 or bf16 at once, and rounding to bf16.
#pragma once

#include <cuda_bf16.h>

#include <cstdint>

namespace heddle::ops::cuda {

constexpr int kVector = 8;  // elements a thread moves at once: 16 bytes of bf16

struct alignas(16) Bf16Vector {
  __nv_bfloat16 x[kVector];
};

/// Elements i .. i + 7 of fp32 or bf16, from a multiple of 16 bytes on.
__device__ __forceinline__ void load(const void* source, bool is_float, std::int64_t i,
                                     float (&x)[kVector]) {
  if (is_float) {
    const float4* from = reinterpret_cast<const float4*>(static_cast<const float*>(source) + i);
    const float4 a = from[0], b = from[1];
    x[0] = a.x, x[1] = a.y, x[2] = a.z, x[3] = a.w;
    x[4] = b.x, x[5] = b.y, x[6] = b.z, x[7] = b.w;
  } else {
    const Bf16Vector a =
        *reinterpret_cast<const Bf16Vector*>(static_cast<const __nv_bfloat16*>(source) + i);
#pragma unroll
    for (int j = 0; j < kVector; ++j) x[j] = __bfloat162float(a.x[j]);
  }
}

/// fp32 x as bf16, rounded by 16 random bits below the last place.
__device__ __forceinline__ __nv_bfloat16 rounded(float x, std::uint32_t bits) {
  if (!isfinite(x)) return __float2bfloat16_rn(x);
  return __ushort_as_bfloat16(
      static_cast<unsigned short>((__float_as_uint(x) + (bits & 0xffffu)) >> 16));
}

}  // namespace heddle::ops::cuda
