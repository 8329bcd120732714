// The instruction wgmma: d [64 x N] = scale_d d + a b over 16 in depth, N a multiple of 32 up to
// 256, or 288 (a in registers: 64 or 128), d in the accumulator layout of mma.cuh.
//
//   rs: a in registers     ss: a in shared memory; descriptors by make_descriptor
//
// kTransA, kTransB: rows of the operand are the contraction. Of 8-bit floats only what
// product_sum.cu takes. Nothing is computed but on sm_90a.
#pragma once

#include "ops/cuda/ptx.cuh"
#include "ops/cuda/wgmma_operands.cuh"

namespace heddle::ops::cuda {

template <int kTransB>
__device__ __forceinline__ void wgmma_rs(float (&d)[8][4], const u32 (&a)[4], u64 b, int scale_d) {
#if defined(__CUDA_ARCH_FEAT_SM90_ALL)
  asm volatile(
      "{.reg .pred p; setp.ne.b32 p, %37, 0; "
      "wgmma.mma_async.sync.aligned.m64n64k16.f32.bf16.bf16 {" HEDDLE_NAMES_32
      "}, "
      "{%32, %33, %34, %35}, %36, p, 1, 1, %38;}"
      : HEDDLE_ROWS_8(d, 0)
      : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "l"(b), "r"(scale_d), "n"(kTransB));
#endif
}

template <int kTransB>
__device__ __forceinline__ void wgmma_rs(float (&d)[16][4], const u32 (&a)[4], u64 b, int scale_d) {
#if defined(__CUDA_ARCH_FEAT_SM90_ALL)
  asm volatile(
      "{.reg .pred p; setp.ne.b32 p, %69, 0; "
      "wgmma.mma_async.sync.aligned.m64n128k16.f32.bf16.bf16 {" HEDDLE_NAMES_64
      "}, "
      "{%64, %65, %66, %67}, %68, p, 1, 1, %70;}"
      : HEDDLE_ROWS_16(d, 0)
      : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "l"(b), "r"(scale_d), "n"(kTransB));
#endif
}

// N columns, R = N / 8 blocks of them, C = N / 2 accumulators a thread; names of the operands after
// these.
#define HEDDLE_WGMMA_SS(N, R, C, A, B, P, TA, TB)                                                 \
  template <int kTransA, int kTransB>                                                             \
  __device__ __forceinline__ void wgmma_ss(float(&d)[R][4], u64 a, u64 b, int scale_d) {          \
    HEDDLE_WGMMA("{.reg .pred p; setp.ne.b32 p, %" #P ", 0; wgmma.mma_async.sync.aligned.m64n" #N \
                 "k16.f32.bf16.bf16 {" HEDDLE_NAMES_##C "}, %" #A ", %" #B ", p, 1, 1, %" #TA     \
                                                        ", %" #TB ";}"                            \
                 : HEDDLE_ROWS_##R(d, 0)                                                          \
                 : "l"(a), "l"(b), "r"(scale_d), "n"(kTransA), "n"(kTransB));                     \
  }
HEDDLE_WGMMA_SS(32, 4, 16, 16, 17, 18, 19, 20)
HEDDLE_WGMMA_SS(64, 8, 32, 32, 33, 34, 35, 36)
HEDDLE_WGMMA_SS(96, 12, 48, 48, 49, 50, 51, 52)
HEDDLE_WGMMA_SS(128, 16, 64, 64, 65, 66, 67, 68)
HEDDLE_WGMMA_SS(160, 20, 80, 80, 81, 82, 83, 84)
HEDDLE_WGMMA_SS(192, 24, 96, 96, 97, 98, 99, 100)
HEDDLE_WGMMA_SS(224, 28, 112, 112, 113, 114, 115, 116)
HEDDLE_WGMMA_SS(256, 32, 128, 128, 129, 130, 131, 132)

/// 288 columns: two instructions, each of half of them.
template <int kTransA, int kTransB>
__device__ __forceinline__ void wgmma_ss(float (&d)[36][4], u64 a, u64 b, int scale_d) {
  static_assert(kTransB == 0, "the second half of b lies 144 rows after the first");
#define HEDDLE_WGMMA_SS_HALF(FIRST, B)                                          \
  HEDDLE_WGMMA(                                                                 \
      "{.reg .pred p; setp.ne.b32 p, %74, 0; "                                  \
      "wgmma.mma_async.sync.aligned.m64n144k16.f32.bf16.bf16 {" HEDDLE_NAMES_72 \
      "}, %72, %73, p, 1, 1, %75, %76;}"                                        \
      : HEDDLE_ROWS_18(d, FIRST)                                                \
      : "l"(a), "l"(B), "r"(scale_d), "n"(kTransA), "n"(kTransB))
  HEDDLE_WGMMA_SS_HALF(0, b);
  HEDDLE_WGMMA_SS_HALF(18, b + (144 * 128 >> 4));
#undef HEDDLE_WGMMA_SS_HALF
}

/// Product of e4m3 values over 32 in depth; the contraction is along the rows of both operands.
__device__ __forceinline__ void wgmma_ss_e4m3(float (&d)[32][4], u64 a, u64 b, int scale_d) {
  HEDDLE_WGMMA(
      "{.reg .pred p; setp.ne.b32 p, %130, 0; "
      "wgmma.mma_async.sync.aligned.m64n256k32.f32.e4m3.e4m3 {" HEDDLE_NAMES_128
      "}, %128, %129, p, 1, 1;}"
      : HEDDLE_ROWS_32(d, 0)
      : "l"(a), "l"(b), "r"(scale_d));
}

#undef HEDDLE_WGMMA_SS

}  // namespace heddle::ops::cuda
