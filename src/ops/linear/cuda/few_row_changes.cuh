// Arguments of the products of a few rows, and their low-rank changes: which rows have which, and
// the CTAs that make the lows of several sets (few_rows.cu says how the launch goes).
#pragma once

#include <algorithm>
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
  int makers;                       ///< batch_rows: clusters that make lows of runs.
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
  /// All changes are of one set, and of ranks that make one tile; after add_lows().
  bool has_one_set() const {
    if (slots.runs != nullptr) return slots.is_one_set && slots.rank <= kColumns;
    for (int i = 0; i < count; ++i) {
      if (sums[i].change.rank > kColumns || sums[i].up_change.rank > kColumns) return false;
    }
    return true;
  }
  bool has_gates() const {
    return std::any_of(sums, sums + count, [](const FewRowSum& sum) { return sum.up != nullptr; });
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

/// Every warp for itself, until all lows are there: `count` announcements.
__device__ __forceinline__ void wait_for_lows(const Arguments& p, u32 count) {
  if (threadIdx.x % 32 == 0) {
    while (load_acquired(p.counters) < count) {
    }
  }
  __syncwarp();
}

/// By one thread, after a barrier with those that wrote them.
__device__ __forceinline__ void announce_lows(const Arguments& p, u32 count) {
  asm volatile("red.release.gpu.global.add.u32 [%0], %1;" ::"l"(p.counters), "r"(count) : "memory");
}

/// The change of the one set that all rows have which have any; of rank 0, if there is none. By
/// whole warps, of which each lane may ask for another layer's.
__device__ __forceinline__ RunOfChange only_set(const Arguments& p, const FewRowChange& change) {
  if (p.slots.runs == nullptr) return run_of(p, change, 0, 0);
  int slot = -1;
  for (int i = threadIdx.x % 32; i < p.slots.count; i += 32) {
    const SlotRun run = load_run(p.slots.runs, i);
    if (run.rows > 0) slot = max(slot, run.slot);
  }
#pragma unroll
  for (int step = 1; step < 32; step *= 2)
    slot = max(slot, __shfl_xor_sync(0xffffffffu, slot, step));
  if (slot < 0 || change.slots == nullptr) return {};
  const SlotFactors factors = load_factors(change.slots, slot);
  return {0,
          0,
          p.rows,
          static_cast<const bf16*>(factors.a),
          static_cast<const bf16*>(factors.b),
          p.depth,
          factors.rank,
          factors.rank,
          factors.scale};
}

/// Up to 64 rows.
struct RowMask {
  u64 bits;
  __device__ __forceinline__ bool has(int row) const { return (bits >> row & 1) != 0; }
};

/// Rows that have a set, by whole warps.
__device__ __forceinline__ RowMask rows_of_sets(const Arguments& p) {
  if (p.slots.runs == nullptr) return {~u64{0}};
  u64 bits = 0;
  for (int i = threadIdx.x % 32; i < p.slots.count; i += 32) {
    const SlotRun run = load_run(p.slots.runs, i);
    if (run.rows > 0 && run.slot >= 0) bits |= ((u64{1} << run.rows) - 1) << run.first;
  }
#pragma unroll
  for (int step = 1; step < 32; step *= 2) bits |= __shfl_xor_sync(0xffffffffu, bits, step);
  return {bits};
}

/// 16 columns of a change's low for one run of rows.
struct LowItem {
  const FewRowChange* change;
  RunOfChange run;  ///< Without rows: there is nothing to do.
  int first;        ///< The first column.
};

/// Item `i` of all, where a table has so many runs.
__device__ __forceinline__ LowItem low_item(const Arguments& p, int runs, int i) {
  const int tile = i / runs;
  int which = 0;
  while (which + 1 < p.low_count && tile >= p.first_low[which + 1]) ++which;
  const FewRowSum& sum = p.sums[p.low_change[which] / 2];
  const FewRowChange& change = p.low_change[which] % 2 == 1 ? sum.up_change : sum.change;
  LowItem item{&change, run_of(p, change, 0, i % runs), (tile - p.first_low[which]) * kColumns};
  if (item.first >= item.run.rank) item.run.rows = 0;
  return item;
}

/// Item `block` of the lows, by the kWarps warps of a CTA. Of S their sums and squares.
template <int kTiles, int kWarps, class S>
__device__ __forceinline__ void make_low(const Arguments& p, S& shared, int block) {
  const int thread = static_cast<int>(threadIdx.x);
  const LowItem item = low_item(p, p.slots.runs != nullptr ? p.slots.count : kTiles, block);
  const RunOfChange& run = item.run;
  const int first = item.first;
  if (run.rows > 0) {
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
    __syncthreads();
    const int row = thread / kColumns, column = thread % kColumns;
    if (row < run.rows) {
      float y = 0, squares = 0;
#pragma unroll
      for (int w = 0; w < kWarps; ++w) {
        y += shared.sums[w][0][row][column];
        squares += shared.squares[w][0][row];
      }
      if (p.norm.weight != nullptr) y *= rsqrtf(squares / p.depth + p.norm.eps);
      const FewRowChange& change = *item.change;
      static_cast<bf16*>(change.low)[(run.first + row) * change.low_stride + first + column] =
          __float2bfloat16_rn(y * run.scale);
    }
    __syncthreads();
  }
  if (thread == 0) announce_lows(p, 1);
}

}  // namespace heddle::ops::cuda::few_row
