// Tensor-core products on swizzled shared-memory tiles (see tile_address), in two interchangeable
// forms. A "group" is 4 warps that own 64 rows, 16 a warp, in the mma accumulator layout; a wgmma
// accumulator has exactly that layout per warp, so the code around the products is shared.
//
//   rs: acc[64 x N] (+)= A (registers, KS steps of 16) * B (shared)
//   ss: acc[64 x N] (+)= A (shared) * B (shared)
//
// kTransB = false: tile rows are N, columns the contraction. kTransB = true: rows are the
// contraction. kTransA = false: tile rows are M (64 of them). kTransA = true: rows are the
// contraction, 64 columns M. Every tile here has 64 rows, so column blocks lie 64 * 128 bytes
// apart.
#pragma once

#include "ops/cuda/wgmma.cuh"

namespace heddle::ops::cuda {

constexpr u32 kBlockBytes = 64 * 128;

template <int N>
__device__ __forceinline__ void zero(float (&a)[N][4]) {
#pragma unroll
  for (int i = 0; i < N; ++i) a[i][0] = a[i][1] = a[i][2] = a[i][3] = 0.f;
}

/// Keeps the compiler from moving uses of registers that an asynchronous product owns.
template <int N>
__device__ __forceinline__ void pin(float (&a)[N][4]) {
#pragma unroll
  for (int i = 0; i < N; ++i)
    asm volatile("" : "+f"(a[i][0]), "+f"(a[i][1]), "+f"(a[i][2]), "+f"(a[i][3])::"memory");
}
template <int N>
__device__ __forceinline__ void pin(u32 (&a)[N][4]) {
#pragma unroll
  for (int i = 0; i < N; ++i)
    asm volatile("" : "+r"(a[i][0]), "+r"(a[i][1]), "+r"(a[i][2]), "+r"(a[i][3])::"memory");
}

__device__ __forceinline__ void mma_bf16(float (&d)[4], const u32 (&a)[4], u32 b0, u32 b1) {
  asm volatile(
      "mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32 {%0,%1,%2,%3}, {%4,%5,%6,%7}, {%8,%9}, "
      "{%0,%1,%2,%3};"
      : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3])
      : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b0), "r"(b1));
}

/// mma.sync, sm_80 and later. Products complete when the call returns.
struct MmaPortable {
  static constexpr bool kHopper = false;
  __device__ static void fence() {}
  __device__ static void commit() {}
  template <int N>
  __device__ static void wait() {}

  template <bool kTransB, int NB>
  __device__ static void step(float (&acc)[NB][4], const u32 (&a)[4], u32 b, int k0, int lane) {
    int m = lane >> 3, r = lane & 7;
#pragma unroll
    for (int n = 0; n < NB; n += 2) {
      u32 f[4];
      if constexpr (kTransB)
        ldmatrix4_trans(f, tile_address(b, 64, k0 + (m & 1) * 8 + r, n * 8 + (m >> 1) * 8));
      else
        ldmatrix4(f, tile_address(b, 64, n * 8 + (m >> 1) * 8 + r, k0 + (m & 1) * 8));
      mma_bf16(acc[n], a, f[0], f[1]);
      mma_bf16(acc[n + 1], a, f[2], f[3]);
    }
  }
  template <bool kTransB, int NB, int KS>
  __device__ static void rs(float (&acc)[NB][4], const u32 (&a)[KS][4], u32 b, bool accumulate) {
    if (!accumulate) zero(acc);
#pragma unroll
    for (int k = 0; k < KS; ++k) step<kTransB>(acc, a[k], b, k * 16, threadIdx.x & 31);
  }
  template <int KS, bool kTransA, bool kTransB, int NB>
  __device__ static void ss(float (&acc)[NB][4], u32 a, u32 b, bool accumulate) {
    int lane = threadIdx.x & 31, m0 = ((threadIdx.x >> 5) & 3) * 16, m = lane >> 3, r = lane & 7;
    if (!accumulate) zero(acc);
#pragma unroll
    for (int k = 0; k < KS; ++k) {
      u32 f[4];
      if constexpr (kTransA)
        load_fragment_trans(f, a, 64, k * 16, m0, lane);
      else
        ldmatrix4(f, tile_address(a, 64, m0 + (m & 1) * 8 + r, k * 16 + (m >> 1) * 8));
      step<kTransB>(acc, f, b, k * 16, lane);
    }
  }
};

/// Shared-memory matrix descriptor: 128-byte swizzle, 1024 bytes between groups of 8 rows, and (for
/// operands whose rows are the contraction) kBlockBytes between blocks of 64 columns.
__device__ __forceinline__ u64 make_descriptor(u32 address) {
  return (u64{1} << 62) | (u64{1024 >> 4} << 32) | (u64{kBlockBytes >> 4} << 16) |
         ((address & 0x3ffff) >> 4);
}

/// wgmma, sm_90a. Products are asynchronous: fence before the first, commit, wait, then pin the
/// registers.
struct MmaHopper {
  static constexpr bool kHopper = true;
  __device__ static void fence() {
#if defined(__CUDA_ARCH_FEAT_SM90_ALL)
    asm volatile("wgmma.fence.sync.aligned;" ::: "memory");
#endif
  }
  __device__ static void commit() {
#if defined(__CUDA_ARCH_FEAT_SM90_ALL)
    asm volatile("wgmma.commit_group.sync.aligned;" ::: "memory");
#endif
  }
  template <int N>
  __device__ static void wait() {
#if defined(__CUDA_ARCH_FEAT_SM90_ALL)
    asm volatile("wgmma.wait_group.sync.aligned %0;" ::"n"(N) : "memory");
#endif
  }
  /// Step k of an operand whose rows are the contraction moves 16 rows; otherwise 16 columns.
  template <bool kRowsAreK>
  __device__ static constexpr u32 offset(int k) {
    return kRowsAreK ? k * 2048 : (k / 4) * kBlockBytes + (k % 4) * 32;
  }
  template <bool kTransB, int NB, int KS>
  __device__ static void rs(float (&acc)[NB][4], const u32 (&a)[KS][4], u32 b, bool accumulate) {
    const u64 db = make_descriptor(b);
#pragma unroll
    for (int k = 0; k < KS; ++k)
      wgmma_rs<kTransB>(acc, a[k], db + (offset<kTransB>(k) >> 4), accumulate || k > 0);
  }
  template <int KS, bool kTransA, bool kTransB, int NB>
  __device__ static void ss(float (&acc)[NB][4], u32 a, u32 b, bool accumulate) {
    const u64 da = make_descriptor(a), db = make_descriptor(b);
#pragma unroll
    for (int k = 0; k < KS; ++k)
      wgmma_ss<kTransA, kTransB>(acc, da + (offset<kTransA>(k) >> 4),
                                 db + (offset<kTransB>(k) >> 4), accumulate || k > 0);
  }
};

}  // namespace heddle::ops::cuda
