// Low-rank changes of any rank, of columns of B that fit a slot or are read from where they are
// (batch_row_changes.cuh says what the changing warps do).
#pragma once

#include "ops/linear/cuda/batch_row_lows.cuh"

namespace heddle::ops::cuda::batch_row {

/// Columns of a warp's piece of work: those of rank 16 fill its place for some of B.
constexpr int span_of(int pitch) { return pitch > 192 ? 48 : 64; }
constexpr int kMostSlices = 4;  ///< Slices of 16 ranks that a warp asks for at a time.

/// A run with a change that has rows in the CTA's part.
struct ChangeJob {
  const bf16* b;
  int b_stride, tile, rank;
  short which, first, rows;
  short width;  ///< Columns of which B fits a slot; 0: B is read from where it is.
};

/// Columns of a job that a warp multiplies at a time: those of a slot and all ranks; without a slot
/// those of a piece of work and 16 ranks.
struct ChangeUnit {
  int job, column, rank;

  __device__ __forceinline__ bool operator!=(const ChangeUnit& other) const {
    return job != other.job || column != other.column;
  }
};

/// The units of a warp from `next` on, of which those before `ahead` have been asked for.
struct ChangeShare {
  ChangeUnit next, ahead, end;
};

/// A slice of 16 ranks of a job's lows.
struct LowSlice {
  int tile;
  short first, rows;
};

/// Shared by the changing warps. kUnits: slots of B that a warp has.
template <int kUnits, int kLowSteps, int kSlotBytes>
struct ChangeShared {
  alignas(128) unsigned char b[kChangers][kUnits][kSlotBytes];
  union {
    LowSums<kLowSteps> making;
    alignas(16) bf16 lows[kChangers][kMostSlices][kRunRows][kRanks];
  };
  u64 landed[kChangers][kUnits];  ///< Barriers.
  u64 released;                   ///< Barrier: the launch before this one has ended.
  ChangeJob jobs[2 * kMostRuns];  ///< Their order does not matter.
  LowSlice slices[kChangers][kMostSlices];
  ChangeShare shares[kChangers];
  int count, most_rows;
  int others;  ///< Jobs with another rank than kRanks, or with B that does not fit slots.

  __device__ __forceinline__ void begin() {
    count = most_rows = others = 0;
    for (int i = 0; i < kChangers * kUnits; ++i) mbar_init(smem_u32(&landed[0][0] + i), 1);
    mbar_init(smem_u32(&released), 1);
  }
};

#if defined(__CUDA_ARCH_FEAT_SM90_ALL)

__device__ __forceinline__ uint2 load_shared8(u32 from) {
  uint2 v;
  asm volatile("ld.shared.v2.u32 {%0, %1}, [%2];" : "=r"(v.x), "=r"(v.y) : "r"(from) : "memory");
  return v;
}
__device__ __forceinline__ void store_shared4(u32 to, float v) {
  asm volatile("st.shared.f32 [%0], %1;" ::"r"(to), "f"(v) : "memory");
}

/// Consecutive bytes, a multiple of 16, to shared memory.
__device__ __forceinline__ void bulk_copy(u32 to, const void* from, u32 bytes, u32 barrier) {
  asm volatile(
      "cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes.L2::cache_hint "
      "[%0], [%1], %2, [%3], %4;" ::"r"(to),
      "l"(from), "r"(bytes), "r"(barrier), "l"(read_once())
      : "memory");
}

/// The columns [first, first + columns) of a sum (gated: of both its layers) for the rows
/// [row_base, row_base + rows). kPitch: floats of a row of the changes.
template <int kPitch, int kUnits, int kLowSteps>
struct ChangesOfAnyRank : LowMaker<kLowSteps> {
  using LowMaker<kLowSteps>::parts;
  static constexpr int kSpan = span_of(kPitch), kSlotBytes = kSpan * kRanks * 2;
  using Shared = ChangeShared<kUnits, kLowSteps, kSlotBytes>;
  const FewRowSum& sum;
  int which, first, columns, row_base, rows;

 protected:
  /// The lows of a warp's slices, summed over the depth, as soon as they are there.
  __device__ __forceinline__ void take_lows(int warp, int slices, u32 round, Shared& shared) const {
    constexpr int kUnderWay = 4;
    const int lane = threadIdx.x % 32, tiles = shared.most_rows > 4 ? 2 : 1,
              place = lane / 8 * kRanks + lane % 8 * 2;
    const u64* const words_of_lane = parts.words + place;
    float low[2] = {};
    for (int at = 0, tile = 0, depth = 0; at < slices;) {
      ulonglong2 words[kUnderWay];
      int from[kUnderWay], to[kUnderWay];  // negative: nothing
#pragma unroll
      for (int k = 0; k < kUnderWay; ++k) {
        from[k] = to[k] = -1;
        if (at >= slices) continue;
        const LowSlice& slice = shared.slices[warp][at];
        if (tile * 4 + lane / 8 < slice.rows) {
          from[k] =
              ((slice.tile * parts.depths + depth) * kMostBatchRows + slice.first + tile * 4) *
              kRanks;
          if (depth + 1 == parts.depths) to[k] = (at * kRunRows + tile * 4) * kRanks + place;
        }
        if (++depth < parts.depths) continue;
        depth = 0;
        if (++tile < tiles) continue;
        tile = 0, ++at;
      }
      bool is_done;
      do {
        is_done = true;
#pragma unroll
        for (int k = 0; k < kUnderWay; ++k) {
          if (from[k] >= 0) words[k] = load_words(words_of_lane + from[k]);
        }
#pragma unroll
        for (int k = 0; k < kUnderWay; ++k) {
          if (from[k] >= 0 && !are_of(words[k], round)) is_done = false;
        }
      } while (!is_done);
#pragma unroll
      for (int k = 0; k < kUnderWay; ++k) {
        if (from[k] < 0) continue;
        low[0] += value_of(words[k].x), low[1] += value_of(words[k].y);
        if (to[k] < 0) continue;
        *reinterpret_cast<u32*>(&shared.lows[warp][0][0][0] + to[k]) = pack_bf16(low[0], low[1]);
        low[0] = low[1] = 0;
      }
    }
    __syncwarp();
  }

  __device__ __forceinline__ static int slices_of(const ChangeJob& job) {
    return job.width > 0 ? (job.rank + kRanks - 1) / kRanks : 1;
  }
  __device__ __forceinline__ static int end_of_span(int column) {
    return column / kSpan * kSpan + kSpan;
  }
  __device__ __forceinline__ void advance(ChangeUnit& unit, const ChangeJob& job) const {
    if (job.width == 0) {
      unit.rank += kRanks;
      if (unit.rank < job.rank) return;
      unit.rank = 0;
    }
    const int end = end_of_span(unit.column);
    unit.column = job.width > 0 ? min(unit.column + job.width, end) : end;
    if (unit.column >= columns) unit.column = 0, ++unit.job;
  }
  /// By a warp: asks for B of the next unit.
  __device__ __forceinline__ void ask(ChangeShare& share, int warp, int slot,
                                      Shared& shared) const {
    const ChangeJob job = shared.jobs[share.ahead.job];
    if (threadIdx.x % 32 == 0) {
      const u32 barrier = smem_u32(&shared.landed[warp][slot]);
      const int column = share.ahead.column,
                count = min(min(static_cast<int>(job.width), end_of_span(column) - column),
                            min(columns, sum.columns - first) - column);
      if (count > 0) {
        const u32 bytes = static_cast<u32>(count * job.rank * 2);
        mbar_expect(barrier, bytes);
        bulk_copy(smem_u32(shared.b[warp][slot]), job.b + (first + column) * job.rank, bytes,
                  barrier);
      } else {
        mbar_arrive(barrier);
      }
    }
    advance(share.ahead, job);
  }
  /// The warp's share of the work, of which it asks for what its slots hold.
  __device__ __forceinline__ void begin(int warp, Shared& shared) const {
    const int spans = (columns + kSpan - 1) / kSpan, all = shared.count * spans;
    const auto unit = [&](int i) { return ChangeUnit{i / spans, i % spans * kSpan, 0}; };
    ChangeShare share{unit(all * warp / kChangers), {}, unit(all * (warp + 1) / kChangers)};
    share.ahead = share.next;
    for (int slot = 0; slot < kUnits && share.ahead != share.end; ++slot)
      ask(share, warp, slot, shared);
    shared.shares[warp] = share;  // by all lanes
  }

  /// Lows times B. Lane 4 g + t has rows 2 t and 2 t + 1 of columns g, g + 8, ... of a unit.
  __device__ __forceinline__ void multiply(int warp, Shared& shared, u32 round,
                                           float* changes) const {
    ChangeShare share = shared.shares[warp];
    int done = 0;
    while (share.next != share.end) {
      int units = 0, slices = 0, before = -1;
      ChangeUnit last = share.next;
      for (; units < kUnits && last != share.end; ++units) {
        const ChangeJob job = shared.jobs[last.job];
        const int own = slices_of(job);
        if (last.job != before || job.width == 0) {
          if (slices + own > kMostSlices) break;
          if (threadIdx.x % 32 < own)
            shared.slices[warp][slices + threadIdx.x % 32] = {
                job.tile + last.rank / kRanks + static_cast<int>(threadIdx.x % 32), job.first,
                job.rows};
          slices += own, before = last.job;
        }
        advance(last, job);
      }
      __syncwarp();
      take_lows(warp, slices, round, shared);
      slices = 0, before = -1;
      for (int u = 0; u < units; ++u, ++done) {
        const ChangeJob job = shared.jobs[share.next.job];
        const int own = slices_of(job);
        if (share.next.job != before || job.width == 0) slices += own, before = share.next.job;
        const int slot = done % kUnits;
        mbar_wait(smem_u32(&shared.landed[warp][slot]), done / kUnits & 1);
        const auto* const lows = &shared.lows[warp][slices - own];
        if (job.width > 0)
          multiply_slot(job, share.next, reinterpret_cast<const bf16*>(shared.b[warp][slot]), own,
                        lows, changes);
        else
          multiply_far(job, share.next, lows, changes);
        advance(share.next, job);
        __syncwarp();
        if (share.ahead != share.end) ask(share, warp, slot, shared);
      }
    }
  }

  /// A unit whose B is in a slot: at most kSteps products of 16 columns and 16 ranks, of which none
  /// waits for another.
  __device__ __forceinline__ void multiply_slot(const ChangeJob& job, const ChangeUnit& unit,
                                                const bf16* slot, int slices,
                                                const bf16 (*lows)[kRunRows][kRanks],
                                                float* changes) const {
    constexpr int kSteps = 4;
    const int lane = threadIdx.x % 32, g = lane / 4, t = lane % 4,
              width = min(static_cast<int>(job.width), end_of_span(unit.column) - unit.column),
              steps = (width + 15) / 16 * slices;
    uint2 low[kSteps], high[kSteps], x[kSteps];
#pragma unroll
    for (int c = 0; c < kSteps; ++c) {
      low[c] = high[c] = x[c] = make_uint2(0, 0);
      const int j = slices == 1   ? c
                    : slices == 2 ? c / 2
                                  : 0,
                i = c - j * slices, at = i * kRanks + 4 * t;
      if (c >= steps || at >= job.rank) continue;
      const bf16* const from = slot + (j * 16 + g) * job.rank + at;
      low[c] = *reinterpret_cast<const uint2*>(from);
      high[c] = *reinterpret_cast<const uint2*>(from + 8 * job.rank);
      if (g < job.rows) x[c] = *reinterpret_cast<const uint2*>(&lows[i][g][4 * t]);
    }
    float sums[kSteps][4] = {};
#pragma unroll
    for (int c = 0; c < kSteps; ++c) {
      const u32 columns_of[4] = {low[c].x, high[c].x, low[c].y, high[c].y};
      mma_bf16(sums[c], columns_of, x[c].x, x[c].y);
    }
    if (slices > 1) {
#pragma unroll
      for (int e = 0; e < 4; ++e) {
        sums[0][e] += sums[1][e], sums[2][e] += sums[3][e];
        if (slices > 2) sums[0][e] += sums[2][e];
        sums[1][e] = sums[2][e];
      }
    }
    const int row = job.first + 2 * t - row_base;
    float* const to = changes + row * kPitch + job.which * columns + unit.column + g;
    const int valid = min(width, columns - unit.column) - g;
#pragma unroll
    for (int r = 0; r < 2; ++r) {
      if (2 * t + r >= job.rows || row + r < 0 || row + r >= rows) continue;
#pragma unroll
      for (int c = 0; c < kSteps; ++c) {
        if (c * 16 < valid) to[r * kPitch + c * 16] = sums[c][r];
        if (c * 16 + 8 < valid) to[r * kPitch + c * 16 + 8] = sums[c][r + 2];
      }
    }
  }

  /// A unit whose B is read from where it is: 16 ranks of a piece of work.
  __device__ __forceinline__ void multiply_far(const ChangeJob& job, const ChangeUnit& unit,
                                               const bf16 (*lows)[kRunRows][kRanks],
                                               float* changes) const {
    const int lane = threadIdx.x % 32, g = lane / 4, t = lane % 4;
    uint2 x = make_uint2(0, 0);
    if (g < job.rows) x = *reinterpret_cast<const uint2*>(&lows[0][g][4 * t]);
#pragma unroll 1
    for (int j = 0; j < kSpan; j += 16) {
      const int column = unit.column + j + g, valid = min(columns, sum.columns - first) - column;
      const bf16* const from = job.b + int64_t{first + column} * job.b_stride;
      const uint2 low = load_factor4(from, unit.rank + 4 * t, job.rank, valid > 0),
                  high =
                      load_factor4(from + 8 * job.b_stride, unit.rank + 4 * t, job.rank, valid > 8);
      float sums[4] = {};
      const u32 columns_of[4] = {low.x, high.x, low.y, high.y};
      mma_bf16(sums, columns_of, x.x, x.y);
      for (int r = 0; r < 2; ++r) {
        const int row = job.first + 2 * t + r - row_base;
        if (2 * t + r >= job.rows || row < 0 || row >= rows) continue;
        float* const to = changes + row * kPitch + job.which * columns + column;
        if (column < columns) to[0] += sums[r];
        if (column + 8 < columns) to[8] += sums[r + 2];
      }
    }
  }
};

#endif

}  // namespace heddle::ops::cuda::batch_row
