// The instruction wgmma on e4m3: d [64 x N] = d + a b over 32 in depth, N a multiple of 32 up to
// 256, d in the accumulator layout of mma.cuh; the contraction is along the rows of what lies in
// shared memory.
//
//   rs: a in registers, four consecutive values of a row in each     ss: a in shared memory
//
// Nothing is computed but on sm_90a.
#pragma once

#include "ops/cuda/ptx.cuh"
#include "ops/cuda/wgmma_operands.cuh"

namespace heddle::ops::cuda {

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

}  // namespace heddle::ops::cuda
