// The instruction wgmma on e4m3: d [64 x N] = d + a b over 32 in depth, N a multiple of 32 up to
// 256, d in the accumulator layout of mma.cuh; the contraction is along the rows of what lies in
// shared memory.
//
//   rs: a in registers, four consecutive values of a row in each     ss: a in shared memory
//
// Nothing is computed but on sm_90a.
#pragma once

#include "ops/cuda/ptx.cuh"

namespace heddle::ops::cuda {

#if defined(__CUDA_ARCH_FEAT_SM90_ALL)
#define HEDDLE_WGMMA(...) asm volatile(__VA_ARGS__)
#else
#define HEDDLE_WGMMA(...)
#endif
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
#define HEDDLE_ROWS_12(d, i) HEDDLE_ROWS_8(d, i), HEDDLE_ROWS_4(d, (i) + 8)
#define HEDDLE_ROWS_16(d, i) HEDDLE_ROWS_8(d, i), HEDDLE_ROWS_8(d, (i) + 8)
#define HEDDLE_ROWS_20(d, i) HEDDLE_ROWS_16(d, i), HEDDLE_ROWS_4(d, (i) + 16)
#define HEDDLE_ROWS_24(d, i) HEDDLE_ROWS_16(d, i), HEDDLE_ROWS_8(d, (i) + 16)
#define HEDDLE_ROWS_28(d, i) HEDDLE_ROWS_16(d, i), HEDDLE_ROWS_12(d, (i) + 16)
#define HEDDLE_ROWS_32(d, i) HEDDLE_ROWS_16(d, i), HEDDLE_ROWS_16(d, (i) + 16)

// N columns, R = N / 8 blocks of them, C = N / 2 accumulators a thread; the names of the operands
// after these, of which a in registers has A0 to A3.
#define HEDDLE_WGMMA_E4M3(N, R, C, A0, A1, A2, A3, B)                                          \
  __device__ __forceinline__ void wgmma_e4m3(float(&d)[R][4], u64 a, u64 b) {                  \
    HEDDLE_WGMMA("wgmma.mma_async.sync.aligned.m64n" #N "k32.f32.e4m3.e4m3 {" HEDDLE_NAMES_##C \
                 "}, %" #A0 ", %" #A1 ", 1, 1, 1;"                                             \
                 : HEDDLE_ROWS_##R(d, 0)                                                       \
                 : "l"(a), "l"(b));                                                            \
  }                                                                                            \
  __device__ __forceinline__ void wgmma_e4m3(float(&d)[R][4], const u32(&a)[4], u64 b) {       \
    HEDDLE_WGMMA("wgmma.mma_async.sync.aligned.m64n" #N "k32.f32.e4m3.e4m3 {" HEDDLE_NAMES_##C \
                 "}, {%" #A0 ", %" #A1 ", %" #A2 ", %" #A3 "}, %" #B ", 1, 1, 1;"              \
                 : HEDDLE_ROWS_##R(d, 0)                                                       \
                 : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "l"(b));                        \
  }
HEDDLE_WGMMA_E4M3(32, 4, 16, 16, 17, 18, 19, 20)
HEDDLE_WGMMA_E4M3(64, 8, 32, 32, 33, 34, 35, 36)
HEDDLE_WGMMA_E4M3(96, 12, 48, 48, 49, 50, 51, 52)
HEDDLE_WGMMA_E4M3(128, 16, 64, 64, 65, 66, 67, 68)
HEDDLE_WGMMA_E4M3(160, 20, 80, 80, 81, 82, 83, 84)
HEDDLE_WGMMA_E4M3(192, 24, 96, 96, 97, 98, 99, 100)
HEDDLE_WGMMA_E4M3(224, 28, 112, 112, 113, 114, 115, 116)
HEDDLE_WGMMA_E4M3(256, 32, 128, 128, 129, 130, 131, 132)

#undef HEDDLE_WGMMA_E4M3
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
