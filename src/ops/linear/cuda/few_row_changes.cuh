// Arguments of the products of a few rows, and their low-rank changes: which rows have which, and
// the CTAs that make the lows (few_rows.cu says how the launch goes).
#pragma once

#include <stdexcept>

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
  u32* counters;  ///< [2]: lows that are done, and CTAs that have seen all of them.

  /// Numbers the tiles of the sums' changes; returns how many there are of each run of rows.
  int add_lows() {
    int tiles = 0;
    for (int i = 0; i < 2 * count; ++i) {
      const FewRowChange& change = i % 2 == 0 ? sums[i / 2].change : sums[i / 2].up_change;
      const int rank = slots.runs != nullptr && change.slots != nullptr ? slots.rank : change.rank;
      if (rank == 0) continue;
      if (low_count == kMostFewRowSums)
        throw std::invalid_argument("few_row_sums: too many changes");
      low_change[low_count] = i;
      first_low[low_count++] = tiles;
      tiles += (rank + kColumns - 1) / kColumns;
    }
    return tiles;
  }
};

/// Counters, zeros, that no launch under way has: each launch leaves its own as zeros, and a
/// recorded one has the same in every replay.
u32* next_counters();

/// By one thread of each of `ctas`, after it has seen the lows: the last one leaves the counters as
/// they were.
__device__ __forceinline__ void leave_lows(const Arguments& p, u32 ctas) {
  if (atomicAdd(p.counters + 1, 1U) + 1 != ctas) return;
  p.counters[0] = 0;
  p.counters[1] = 0;
}

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

/// Every warp for itself, until all lows are there.
__device__ __forceinline__ void wait_for_lows(const Arguments& p) {
  if (threadIdx.x % 32 == 0) {
    while (load_acquired(p.counters) < static_cast<u32>(p.low_blocks)) {
    }
  }
  __syncwarp();
}

/// Sums of the warps that make a low.
template <int kWarps>
struct LowShared {
  float sums[kWarps][1][8][kColumns];
  float squares[kWarps][1][8];
};

/// 16 columns of a change's low for one run of rows, number `block` of all, by kWarps warps, of
/// which `sync` is a barrier. Of S sums and squares of the warps, as in LowShared.
template <int kTiles, int kWarps, int kAhead, class S, class Sync>
__device__ __forceinline__ void make_low(const Arguments& p, S& shared, int block, int thread,
                                         const Sync& sync) {
  const int runs = p.slots.runs != nullptr ? p.slots.count : kTiles, tile = block / runs;
  int which = 0;
  while (which + 1 < p.low_count && tile >= p.first_low[which + 1]) ++which;
  const FewRowSum& sum = p.sums[p.low_change[which] / 2];
  const FewRowChange& change = p.low_change[which] % 2 == 1 ? sum.up_change : sum.change;
  const RunOfChange run = run_of(p, change, 0, block % runs);
  const int first = (tile - p.first_low[which]) * kColumns;
  if (run.rows > 0 && first < run.rank) {
    const int warp = thread / 32, lane = thread % 32, line = lane / 4, place = lane % 4 * 8;
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
    // The rest too is asked for before others' matrices are.
    if (thread == 0 && run.a_stride == p.depth)
      bring_near(run.a + first * run.a_stride,
                 static_cast<u32>(min(kColumns, run.rank - first) * p.depth * 2));
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
    sync();
    const int row = thread / kColumns, column = thread % kColumns;
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
    sync();
  }
  if (thread == 0)
    asm volatile("fence.acq_rel.gpu;\nred.release.gpu.global.add.u32 [%0], 1;" ::"l"(p.counters)
                 : "memory");
}

}  // namespace heddle::ops::cuda::few_row
