// Arguments of the products of a few rows, and their low-rank changes: which rows have which, and
// the CTAs that make the lows (few_rows.cu says how the launch goes).
#pragma once

#include "ops/cuda/dependent_launch.cuh"
#include "ops/cuda/reduce.cuh"
#include "ops/linear/cuda/few_row_parts.cuh"

namespace heddle::ops::cuda::few_row {

constexpr int kColumns = kFewRowColumns, kDepth = kFewRowDepth, kAhead = 4;
using Vector = FewRowVector;

struct Arguments {
  FewRowSum sums[kMostFewRowSums];
  int first_block[kMostFewRowSums + 1];  ///< Each sum's, and the number of all.
  int count, rows;
  FewRowNorm norm;
  FewRowSlots slots;
  // The changes' tiles of 16 columns of the lows, by the CTAs that make them:
  const void* x;
  int64_t x_stride;
  int depth, low_blocks;
  int resident;                     ///< CTAs that the device holds at a time.
  int low_change[kMostFewRowSums];  ///< Twice the sum's number; one more: its up_change.
  int first_low[kMostFewRowSums], low_count;
  u32* counters;  ///< [2]: CTAs that are done with the lows, and those that have seen it.
};

/// Rows that have the same change.
struct RunOfChange {
  int which, first, rows;  ///< Number of a gated sum's change; the rows.
  const bf16 *a, *b;
  int64_t a_stride, b_stride;
  int rank;
  float scale;
};

/// Run `place` of a change; without rows, or of rank 0, if there is nothing to do.
__device__ __forceinline__ RunOfChange run_of(const Arguments& p, const FewRowChange& change,
                                              int which, int place) {
  if (p.slots.runs == nullptr) {
    return {which,
            place * 8,
            min(8, p.rows - place * 8),
            static_cast<const bf16*>(change.a),
            static_cast<const bf16*>(change.b),
            change.a_stride,
            change.b_stride,
            change.rank,
            change.scale};
  }
  const SlotRun run = load_run(p.slots.runs, place);
  if (run.rows == 0 || run.slot < 0 || change.slots == nullptr) return {};
  const SlotFactors factors = load_factors(change.slots, run.slot);
  return {which,
          run.first,
          run.rows,
          static_cast<const bf16*>(factors.a),
          static_cast<const bf16*>(factors.b),
          p.depth,
          factors.rank,
          factors.rank,
          factors.scale};
}

/// Job `job` of the changes of a sum.
template <int kTiles>
__device__ __forceinline__ RunOfChange run_of_job(const Arguments& p, const FewRowSum& sum,
                                                  int job) {
  const int runs = p.slots.runs != nullptr ? p.slots.count : kTiles,
            which = sum.up != nullptr ? job / runs : 0;
  if (which > 1 || job - which * runs >= runs) return {};
  return run_of(p, which == 0 ? sum.change : sum.up_change, which, job - which * runs);
}

/// 8 elements of a row of b from `at` on, those beyond its rank as zeros. Rows of other ranks than
/// multiples of 8 begin anywhere.
__device__ __forceinline__ Vector load_factor(const RunOfChange& run, int column, int at) {
  const bf16* const from = run.b + column * run.b_stride + at;
  if (run.rank % 8 == 0) return at < run.rank ? load<8>(from) : Vector{};
  Vector v{};
#pragma unroll
  for (int i = 0; i < 8; ++i) {
    if (at + i < run.rank)
      v.words[i / 2] |= static_cast<u32>(__bfloat16_as_ushort(from[i])) << (i % 2 * 16);
  }
  return v;
}

__device__ __forceinline__ void prefetch(const void* address) {
  asm volatile("prefetch.global.L2 [%0];" ::"l"(address));
}

__device__ __forceinline__ u32 load_acquired(const u32* address) {
  u32 v;
  asm volatile("ld.acquire.gpu.global.u32 %0, [%1];" : "=r"(v) : "l"(address) : "memory");
  return v;
}

/// A CTA's 16 columns of a change's low for one run of rows.
template <int kTiles, int kWarps, class S>
__device__ __forceinline__ void make_low(const Arguments& p, S& shared) {
  const int runs = p.slots.runs != nullptr ? p.slots.count : kTiles,
            tile = static_cast<int>(blockIdx.x) / runs;
  int which = 0;
  while (which + 1 < p.low_count && tile >= p.first_low[which + 1]) ++which;
  const FewRowSum& sum = p.sums[p.low_change[which] / 2];
  const FewRowChange& change = p.low_change[which] % 2 == 1 ? sum.up_change : sum.change;
  const RunOfChange run = run_of(p, change, 0, static_cast<int>(blockIdx.x) % runs);
  const int first = (tile - p.first_low[which]) * kColumns;
  if (run.rows > 0 && first < run.rank) {
    const int warp = threadIdx.x / 32, lane = threadIdx.x % 32, line = lane / 4,
              place = lane % 4 * 8;
    const bool has_low = first + line < run.rank, has_high = first + line + 8 < run.rank;
    const bf16* const from = run.a + (first + line) * run.a_stride + place;
    Vector a[kAhead][2];
    const auto fetch = [&](int base) {
#pragma unroll
      for (int n = 0; n < kAhead; ++n) {
        const int at = base + n * kWarps * kDepth;
        a[n][0] = {}, a[n][1] = {};
        if (at + place >= p.depth) continue;
        if (has_low) a[n][0] = load<8>(from + at);
        if (has_high) a[n][1] = load<8>(from + 8 * run.a_stride + at);
      }
    };
    fetch(warp * kDepth);
    wait_for_previous();
    float total[1][4] = {}, square[1] = {};
    for (int base = warp * kDepth; base < p.depth; base += kWarps * kDepth * kAhead) {
      if (base > warp * kDepth) fetch(base);
      Vector x[kAhead][1];
#pragma unroll
      for (int n = 0; n < kAhead; ++n) {
        const int at = base + n * kWarps * kDepth + place;
        x[n][0] = {};
        if (at < p.depth && line < run.rows)
          x[n][0] = load_row(p.x, (run.first + line) * p.x_stride + at);
      }
#pragma unroll
      for (int n = 0; n < kAhead; ++n) {
        const int column = base + n * kWarps * kDepth + place;
        if (p.norm.weight != nullptr && column < p.depth) apply_norm(p.norm, column, x[n], square);
        multiply(total, a[n][0], a[n][1], x[n]);
      }
    }
    float(&sums)[1][8][kColumns] = reinterpret_cast<float(&)[1][8][kColumns]>(shared.sums[warp]);
    put(sums, total);
    const float of_row = lane_sum<4>(square[0]);
    if (lane % 4 == 0) shared.squares[warp][0][line] = of_row;
    __syncthreads();
    const int row = static_cast<int>(threadIdx.x) / kColumns,
              column = static_cast<int>(threadIdx.x) % kColumns;
    if (row < run.rows) {
      float y = 0, squares = 0;
#pragma unroll
      for (int w = 0; w < kWarps; ++w) {
        y += shared.sums[w][0][row][column];
        squares += shared.squares[w][0][row];
      }
      if (p.norm.weight != nullptr) y *= rsqrtf(squares / p.depth + p.norm.eps);
      static_cast<bf16*>(change.low)[(run.first + row) * change.low_stride + first + column] =
          __float2bfloat16_rn(y * run.scale);
    }
    __syncthreads();
  }
  if (threadIdx.x == 0)
    asm volatile("fence.acq_rel.gpu;\nred.release.gpu.global.add.u32 [%0], 1;" ::"l"(p.counters)
                 : "memory");
}

}  // namespace heddle::ops::cuda::few_row
