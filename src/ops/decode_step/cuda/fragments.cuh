// Operations of the multiplying warps on registers alone.
#pragma once

#include "ops/cuda/ptx.cuh"

namespace heddle::ops::cuda::decode {

__device__ __forceinline__ void mma(float (&c)[4], u32 a0, u32 a1, u32 a2, u32 a3, u32 b0, u32 b1) {
  asm volatile(
      "mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32 {%0,%1,%2,%3}, {%4,%5,%6,%7}, {%8,%9}, "
      "{%0,%1,%2,%3};"
      : "+f"(c[0]), "+f"(c[1]), "+f"(c[2]), "+f"(c[3])
      : "r"(a0), "r"(a1), "r"(a2), "r"(a3), "r"(b0), "r"(b1));
}
__device__ __forceinline__ u32 transposed(u32 v) {
  u32 r;
  asm volatile("movmatrix.sync.aligned.m8n8.trans.b16 %0, %1;" : "=r"(r) : "r"(v));
  return r;
}
/// The compiler knows nothing of these afterwards.
template <class... T>
__device__ __forceinline__ void forget_values(T&... values) {
  const auto forget = [](auto& value) {
    if constexpr (sizeof(value) == 8)
      asm volatile("" : "+l"(value));
    else
      asm volatile("" : "+r"(value));
  };
  (forget(values), ...);
}
__device__ __forceinline__ float silu(float x) { return x / (1.f + __expf(-x)); }

}  // namespace heddle::ops::cuda::decode
