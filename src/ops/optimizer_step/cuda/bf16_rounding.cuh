// Stochastic rounding to bf16.
#pragma once

#include <cuda_bf16.h>

#include <cstdint>

namespace heddle::ops::cuda {

/// fp32 x with 16 random bits added below the bf16 pattern's last place.
__device__ __forceinline__ __nv_bfloat16 rounded(float x, std::uint32_t bits) {
  if (!isfinite(x)) return __float2bfloat16_rn(x);
  return __ushort_as_bfloat16(
      static_cast<unsigned short>((__float_as_uint(x) + (bits & 0xffffu)) >> 16));
}

}  // namespace heddle::ops::cuda
