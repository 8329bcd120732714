// Shared by the two kernels of packed_backward.h: the work list, and score tiles of 64 queries by
// 64 keys, 16 rows a warp.
#pragma once

#include <cuda.h>

#include "ops/attention/cuda/packed_backward.h"
#include "ops/cuda/mma.cuh"

namespace heddle::ops::cuda::packed {

using Mma = MmaHopper;

constexpr int kRows = kPackedBackwardRows, kDim = kPackedBackwardDim;
constexpr int kGroup = 128, kThreads = 3 * kGroup;  ///< One group loads, two multiply.
constexpr int kConsumers = 2 * kGroup;
constexpr u32 kTile = kRows * kDim * 2, kSquare = kRows * kRows * 2;
constexpr u32 kHalfTile = kTile / 2;  ///< 128 columns.
constexpr float kLog2e = 1.4426950408889634f;
/// Registers of a thread that loads and of one that multiplies: together what the launch is given,
/// 168 a thread.
constexpr int kLoaderRegisters = 40, kConsumerRegisters = 232;

struct Args {
  CUtensorMap q, k, v, d_o;
  const float *lse, *delta;
  const int32_t* cu_seqlens;
  const int2* work;  ///< (sequence, tile in it), or (-1, 0); the longest sequences first.
  bf16 *dq, *dk, *dv;
  int q_heads, k_heads;
  float scale;
};

/// Gradients of keys and values: one CTA for 64 keys of a head. Of queries: for 128 of a head.
void launch_key_gradients(const Args& args, unsigned entries, cudaStream_t stream);
void launch_query_gradients(const Args& args, unsigned entries, cudaStream_t stream);

struct Sequence {
  int first, length;

  __device__ __forceinline__ Sequence(const Args& a, int s)
      : first(a.cu_seqlens[s]), length(a.cu_seqlens[s + 1] - first) {}
  __device__ __forceinline__ int tiles() const { return (length + kRows - 1) / kRows; }
  __device__ __forceinline__ int row(int tile) const { return first + tile * kRows; }
  __device__ __forceinline__ int valid(int tile) const { return min(kRows, length - tile * kRows); }
};

/// Where a thread of a group stands; of a score tile it holds rows `row` and `row` + 8.
struct Place {
  int tid, lane, warp, row;

  __device__ __forceinline__ Place()
      : tid(threadIdx.x % kGroup), lane(tid % 32), warp(tid / 32), row(warp * 16 + lane / 4) {}
};

__device__ __forceinline__ void named_arrive(int id, int threads) {
  asm volatile("bar.arrive %0, %1;" ::"r"(id), "r"(threads) : "memory");
}

/// A warp is done with what stands after `bar`.
__device__ __forceinline__ void release(u32 bar, const Place& at) {
  if (at.lane == 0) mbar_arrive(bar);
}

/// 64 rows of a head, by one thread.
__device__ __forceinline__ void load_tile(u32 to, const CUtensorMap& map, int row, int head,
                                          u32 bar) {
#pragma unroll 1
  for (int block = 0; block < kDim / 64; ++block)
    bulk_load_box(to + block * kBlockBytes, &map, head * kDim + block * 64, row, bar);
}

/// Rows from `valid` on belong to others: even times zero they may not be added.
__device__ __forceinline__ void clear_rows(u32 tile, int valid, const Place& at) {
  for (int i = valid * 32 + at.tid; i < kRows * 32; i += kGroup)
    asm volatile("st.shared.v4.u32 [%0], {%1, %1, %1, %1};" ::"r"(
                     tile_address(tile, kRows, i / 32, i % 32 * 8)),
                 "r"(0)
                 : "memory");
}

/// Loads the thread's two rows of a tile, from [tokens, q_heads]; missing rows repeat the last.
__device__ __forceinline__ void load_stats(float (&to)[2], const float* stats, float factor,
                                           const Args& a, const Sequence& s, int tile, int head,
                                           const Place& at) {
#pragma unroll
  for (int e = 0; e < 2; ++e) {
    const int row = min(at.row + 8 * e, s.valid(tile) - 1);
    to[e] = stats[int64_t{s.row(tile) + row} * a.q_heads + head] * factor;
  }
}

/// Scores to probabilities, with `scale` and `lse` in base 2. A tile on the diagonal has none above
/// it, and rows from `valid` on have none at all.
__device__ __forceinline__ void probabilities(float (&s)[8][4], const float (&lse)[2], float scale,
                                              bool diagonal, int valid, const Place& at) {
  const bool masked = diagonal || valid < kRows;
#pragma unroll
  for (int j = 0; j < 8; ++j) {
#pragma unroll
    for (int e = 0; e < 4; ++e) {
      float p = exp2_fast(s[j][e] * scale - lse[e / 2]);
      if (masked) {
        const int row = at.row + e / 2 * 8, column = j * 8 + at.lane % 4 * 2 + e % 2;
        if (row >= valid || (diagonal && column > row)) p = 0;
      }
      s[j][e] = p;
    }
  }
}

/// The gradient of a score; what is no probability (zero) has none, whatever stands beside it.
__device__ __forceinline__ float grad_score(float p, float dp, float delta) {
  return p == 0 ? 0.f : p * (dp - delta);
}

/// Columns 8 j .. 8 j + 15 of an accumulator as a fragment of bf16.
template <int N>
__device__ __forceinline__ void fragment(u32 (&f)[4], const float (&x)[N][4], int j, float scale) {
#pragma unroll
  for (int e = 0; e < 4; ++e)
    f[e] = pack_bf16(x[j + e / 2][e % 2 * 2] * scale, x[j + e / 2][e % 2 * 2 + 1] * scale);
}

/// A group's accumulator to shared memory, from column `first` of the tile on.
template <int N>
__device__ __forceinline__ void put_fragments(u32 tile, const float (&x)[N][4], float scale,
                                              const Place& at) {
#pragma unroll
  for (int j = 0; j < N; j += 2) {
    u32 f[4];
    fragment(f, x, j, scale);
    store_fragment(tile, kRows, at.warp * 16, j * 8, at.lane, f);
  }
}

}  // namespace heddle::ops::cuda::packed
