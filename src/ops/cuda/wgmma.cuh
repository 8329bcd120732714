// The instruction wgmma: d [64 x N] = scale_d d + a b over 16 in depth, N a multiple of 32 up to
// 256 (a in registers: 64 or 128), d in the accumulator layout of mma.cuh.
//
//   rs: a in registers     ss: a in shared memory; descriptors by make_descriptor
//
// kTransA, kTransB: rows of the operand are the contraction. Of 8-bit floats only what
// product_sum.cu takes. Nothing is computed but on sm_90a.
#pragma once

#include "ops/cuda/ptx.cuh"

namespace heddle::ops::cuda {

// An asm statement has no loops: the names of the accumulators in its text, and the operands.
#define HEDDLE_NAMES_16 "%0, %1, %2, %3, %4, %5, %6, %7, %8, %9, %10, %11, %12, %13, %14, %15"
#define HEDDLE_NAMES_32 \
  HEDDLE_NAMES_16       \
  ", %16, %17, %18, %19, %20, %21, %22, %23, %24, %25, %26, %27, %28, %29, %30, %31"
#define HEDDLE_NAMES_48 \
  HEDDLE_NAMES_32       \
  ", %32, %33, %34, %35, %36, %37, %38, %39, %40, %41, %42, %43, %44, %45, %46, %47"
#define HEDDLE_NAMES_64 \
  HEDDLE_NAMES_48       \
  ", %48, %49, %50, %51, %52, %53, %54, %55, %56, %57, %58, %59, %60, %61, %62, %63"
#define HEDDLE_NAMES_80 \
  HEDDLE_NAMES_64       \
  ", %64, %65, %66, %67, %68, %69, %70, %71, %72, %73, %74, %75, %76, %77, %78, %79"
#define HEDDLE_NAMES_96 \
  HEDDLE_NAMES_80       \
  ", %80, %81, %82, %83, %84, %85, %86, %87, %88, %89, %90, %91, %92, %93, %94, %95"
#define HEDDLE_NAMES_112 \
  HEDDLE_NAMES_96        \
  ", %96, %97, %98, %99, %100, %101, %102, %103, %104, %105, %106, %107, %108, %109, %110, %111"
#define HEDDLE_NAMES_128                                                                         \
  HEDDLE_NAMES_112                                                                               \
  ", %112, %113, %114, %115, %116, %117, %118, %119, %120, %121, %122, %123, %124, %125, %126, " \
  "%127"
#define HEDDLE_ROW(d, i) "+f"(d[i][0]), "+f"(d[i][1]), "+f"(d[i][2]), "+f"(d[i][3])
#define HEDDLE_ROWS_4(d, i) \
  HEDDLE_ROW(d, i), HEDDLE_ROW(d, (i) + 1), HEDDLE_ROW(d, (i) + 2), HEDDLE_ROW(d, (i) + 3)
#define HEDDLE_ROWS_8(d, i) HEDDLE_ROWS_4(d, i), HEDDLE_ROWS_4(d, (i) + 4)
#define HEDDLE_ROWS_16(d, i) HEDDLE_ROWS_8(d, i), HEDDLE_ROWS_8(d, (i) + 8)
#define HEDDLE_ROWS_12(d, i) HEDDLE_ROWS_8(d, i), HEDDLE_ROWS_4(d, (i) + 8)
#define HEDDLE_ROWS_20(d, i) HEDDLE_ROWS_16(d, i), HEDDLE_ROWS_4(d, (i) + 16)
#define HEDDLE_ROWS_24(d, i) HEDDLE_ROWS_16(d, i), HEDDLE_ROWS_8(d, (i) + 16)
#define HEDDLE_ROWS_28(d, i) HEDDLE_ROWS_16(d, i), HEDDLE_ROWS_12(d, (i) + 16)
#define HEDDLE_ROWS_32(d, i) HEDDLE_ROWS_16(d, i), HEDDLE_ROWS_16(d, (i) + 16)

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

#if defined(__CUDA_ARCH_FEAT_SM90_ALL)
#define HEDDLE_WGMMA(...) asm volatile(__VA_ARGS__)
#else
#define HEDDLE_WGMMA(...)
#endif
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
#undef HEDDLE_WGMMA
#undef HEDDLE_NAMES_16
#undef HEDDLE_NAMES_32
#undef HEDDLE_NAMES_48
#undef HEDDLE_NAMES_64
#undef HEDDLE_NAMES_80
#undef HEDDLE_NAMES_96
#undef HEDDLE_NAMES_112
#undef HEDDLE_NAMES_128
#undef HEDDLE_ROW
#undef HEDDLE_ROWS_4
#undef HEDDLE_ROWS_8
#undef HEDDLE_ROWS_12
#undef HEDDLE_ROWS_16
#undef HEDDLE_ROWS_20
#undef HEDDLE_ROWS_24
#undef HEDDLE_ROWS_28
#undef HEDDLE_ROWS_32

}  // namespace heddle::ops::cuda
