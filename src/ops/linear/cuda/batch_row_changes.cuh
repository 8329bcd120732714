// Low-rank changes of the products of a batch's rows (batch_rows.cu says how the launch goes).
//
// A CTA multiplies the lows of its rows by B, which bulk copies bring to slots of shared memory
// before the lows are there. Registers would be too few: what they cannot hold goes to the L2, as
// the first level of cache has less than 30 KB beside so much shared memory.
//
// Warps that have nothing to do before the rows are there list the runs of rows with a change and
// ask for B. Where all ranks are 16, as is most usual, code of its own multiplies, as each
// instruction between the last low and the sums costs time.
#pragma once

#include "ops/linear/cuda/batch_row_any_rank.cuh"

namespace heddle::ops::cuda::batch_row {

#if defined(__CUDA_ARCH_FEAT_SM90_ALL)

/// The changes of a CTA's tile, and its share of all lows.
template <int kPitch, int kUnits, int kSteps>
struct ChangedTile : ChangesOfAnyRank<kPitch, kUnits, kSteps> {
  using Base = ChangesOfAnyRank<kPitch, kUnits, kSteps>;
  using Base::begin, Base::fetch, Base::fetch_norm, Base::fetch_rows, Base::first_part, Base::look;
  using Base::columns, Base::first, Base::kNorms, Base::kSpan, Base::kThreads, Base::parts;
  using Base::look_at_part, Base::make_part, Base::multiply, Base::part_of, Base::put_norm;
  using Base::row_base, Base::rows, Base::run_of, Base::sum, Base::tile_of, Base::which;
  using typename Base::FirstPart;
  using typename Base::Found;
  using typename Base::Part;
  using typename Base::Shared;
  static constexpr int kListers = 128;  ///< Threads that list the jobs.

  /// By kListers threads: job `thread` of the tile.
  __device__ __forceinline__ Found look_at_job(int thread) const {
    return look(change_of_job(thread).slots, thread % kMostRuns);
  }

  /// By kListers threads before the launch before this one has ended: the jobs of the tile.
  __device__ __forceinline__ void list(int thread, const Found& found, Shared& shared) const {
    static_assert(kListers == 2 * kMostRuns);
    const int layer = thread / kMostRuns;
    if (layer == 0 || sum.up != nullptr) {
      const RunOfChange run = run_of(
          found, [&]() -> const FewRowChange& { return change_of_job(thread); }, layer,
          thread % kMostRuns);
      if (run.rows > 0 && run.rank > 0 && run.first < row_base + rows &&
          run.first + run.rows > row_base) {
        const bool is_whole = run.b_stride == run.rank && run.rank % 8 == 0 && run.rank <= 64;
        const int width = kSlotBytes / 2 / ((run.rank + 15) / 16 * 16) / 16 * 16;
        shared.jobs[atomicAdd(&shared.count, 1)] = {
            run.b,
            static_cast<int>(run.b_stride),
            tile_of(2 * which + layer),
            run.rank,
            static_cast<short>(layer),
            static_cast<short>(run.first),
            static_cast<short>(run.rows),
            static_cast<short>(is_whole ? min(width, kSpan) : 0)};
        atomicMax(&shared.most_rows, run.rows);
        if (!is_whole || run.rank != kRanks) shared.others = 1;
      }
    }
    named_sync(8, kListers);
    if (shared.others == 0 && thread < kChangers * kUnits)
      ask_sixteen(thread, thread % kChangers, thread / kChangers, shared);
  }
  /// By all threads but the changing warps' and the loading one's, `threads` of them.
  __device__ __forceinline__ void begin_changes(int threads) const {
    asm volatile("bar.arrive 5, %0;" ::"r"(threads + kThreads) : "memory");
  }

  /// Changes [rows, kPitch] by kChangers warps, zeros where there is none; of a gated sum those of
  /// the second layer follow the first one's columns. They lack the norm's factor of the row.
  /// `own`: the CTA's first part. `beginners`: the threads that call begin_changes().
  /// is_maker: of a CTA that makes lows alone.
  /// kEarly: see LowMaker::fetch_first().
  template <bool kEarly>
  __device__ __forceinline__ void make(int thread, const FirstPart& own, Shared& shared,
                                       int beginners, bool is_maker, float* changes) const {
    int at = first_part();
    u32 round;
    {
      if (is_maker) {
        wait_for_previous();
      } else {
        named_sync(kEarly ? 9 : 6, kThreads + 32);
        mbar_wait(smem_u32(&shared.released), 0);
      }
      FewRowVector x[kSteps][1];
      fetch_rows(own.part, thread, x);
      round = load_relaxed(parts.counter) + 1;
      for (int i = 0; i < kNorms; ++i) put_norm(own.norm[i], thread + i * kThreads, shared.making);
      named_sync(4, kThreads);
      if (own.part.run.rows > 0) make_part(own.part, thread, own.a, x, shared.making, round);
    }
    if (!is_maker) {
      named_sync(5, beginners + kThreads);
      if (shared.others != 0) begin(thread / 32, shared);
    }
    for (at += parts.makers; at < parts.count; at += parts.makers) {
      const Part part = part_of(at, look_at_part(at));
      if (part.run.rows <= 0) continue;
      FewRowVector a[kSteps][2], x[kSteps][1];
      fetch(part, thread, a);
      fetch_rows(part, thread, x);
      for (int i = 0; i < kNorms; ++i)
        put_norm(fetch_norm(part, thread + i * kThreads), thread + i * kThreads, shared.making);
      named_sync(4, kThreads);
      make_part(part, thread, a, x, shared.making, round);
    }
    if (is_maker) return;
    shared.others == 0 ? multiply_sixteens(thread / 32, shared, round, changes)
                       : multiply(thread / 32, shared, round, changes);
  }

  /// A warp that does not change says to the changing ones that `released` is there.
  __device__ __forceinline__ void say_begun() const {
    asm volatile("bar.arrive 9, %0;" ::"n"(kThreads + 32) : "memory");
  }
  /// The warp that says so waits here until the changing ones have asked for A.
  __device__ __forceinline__ void wait_for_first_part() const { named_sync(6, kThreads + 32); }

  /// Zeros to the changes, by `threads` threads.
  __device__ __forceinline__ void clear(int thread, int threads, float* changes) const {
    for (int i = thread; i < rows * kPitch / 4; i += threads)
      reinterpret_cast<float4*>(changes)[i] = {0, 0, 0, 0};
  }

 private:
  __device__ __forceinline__ const FewRowChange& change_of_job(int thread) const {
    return thread < kMostRuns ? sum.change : sum.up_change;
  }

  /// Where all ranks are kRanks: unit u is columns of job u / spans, of warp u % kChangers.
  __device__ __forceinline__ int log_of_spans() const {
    return columns <= kSpan ? 0 : columns <= 2 * kSpan ? 1 : 2;
  }
  __device__ __forceinline__ void ask_sixteen(int unit, int warp, int slot, Shared& shared) const {
    const int log = log_of_spans(), column = (unit & ((1 << log) - 1)) * kSpan;
    if (unit >= shared.count << log) return;
    const u32 barrier = smem_u32(&shared.landed[warp][slot]);
    const int count = min(min(kSpan, columns - column), sum.columns - first - column);
    if (count > 0) {
      const u32 bytes = static_cast<u32>(count * kRanks * 2);
      mbar_expect(barrier, bytes);
      bulk_copy(smem_u32(shared.b[warp][slot]),
                shared.jobs[unit >> log].b + (first + column) * kRanks, bytes, barrier);
    } else {
      mbar_arrive(barrier);
    }
  }
  __device__ __forceinline__ void multiply_sixteens(int warp, Shared& shared, u32 round,
                                                    float* changes) const {
    const int lane = threadIdx.x % 32, g = lane / 4, t = lane % 4, log = log_of_spans(),
              all = shared.count << log;
    const u32 slots = smem_u32(shared.b[warp][0]) + g * (kRanks * 2) + t * 8,
              landed = smem_u32(&shared.landed[warp][0]), to_all = smem_u32(changes) + g * 4;
    constexpr int kOwnSlot = slot_of(kPitch);
    int phase = 0;
    for (int base = warp; base < all; base += kChangers * kUnits, phase ^= 1) {
      // The lows of all slots' units, of which a lane has four ranks of a row.
      int from[kUnits];  // negative: nothing
      float low[kUnits][4] = {};
      int to[kUnits];
      u32 own = 0;  // bits 2 k and 2 k + 1: rows of unit k that are the lane's to store
#pragma unroll
      for (int k = 0; k < kUnits; ++k) {
        from[k] = -1;
        to[k] = 0;
        const int unit = base + k * kChangers;
        if (unit >= all) continue;
        const ChangeJob& job = shared.jobs[unit >> log];
        const int count = job.rows, row = job.first + 2 * t - row_base;
        if (g < count)
          from[k] = (job.tile * parts.depths * kMostBatchRows + job.first + g) * kRanks + 4 * t;
        to[k] = (row * kPitch + job.which * columns + (unit & ((1 << log) - 1)) * kSpan) * 4;
        if (2 * t < count && row >= 0 && row < rows) own |= 1U << (2 * k);
        if (2 * t + 1 < count && row + 1 >= 0 && row + 1 < rows) own |= 2U << (2 * k);
      }
      // Words of as many depths at once as registers hold; those that are not there again.
      constexpr int kAtOnce = kUnits > 3 ? 1 : 2, kDepthWords = kMostBatchRows * kRanks;
      for (int depth = 0; depth < parts.depths; depth += kAtOnce) {
        ulonglong2 words[kAtOnce][kUnits][2];
        const auto is_wanted = [&](int d, int k) {
          return from[k] >= 0 && depth + d < parts.depths;
        };
        const auto is_there = [&](int d, int k) {
          return are_of(words[d][k][0], round) && are_of(words[d][k][1], round);
        };
        const auto ask = [&](int d, int k) {
          const u64* const at = parts.words + from[k] + d * kDepthWords;
          words[d][k][0] = load_words(at);
          words[d][k][1] = load_words(at + 2);
        };
#pragma unroll
        for (int d = 0; d < kAtOnce; ++d) {
#pragma unroll
          for (int k = 0; k < kUnits; ++k) {
            if (is_wanted(d, k)) ask(d, k);
          }
        }
        for (bool is_done = false; !is_done;) {
          is_done = true;
#pragma unroll
          for (int d = 0; d < kAtOnce; ++d) {
#pragma unroll
            for (int k = 0; k < kUnits; ++k) {
              if (!is_wanted(d, k) || is_there(d, k)) continue;
              ask(d, k);
              is_done = false;
            }
          }
        }
#pragma unroll
        for (int d = 0; d < kAtOnce; ++d) {
#pragma unroll
          for (int k = 0; k < kUnits; ++k) {
            if (!is_wanted(d, k)) continue;
            low[k][0] += value_of(words[d][k][0].x), low[k][1] += value_of(words[d][k][0].y);
            low[k][2] += value_of(words[d][k][1].x), low[k][3] += value_of(words[d][k][1].y);
          }
        }
#pragma unroll
        for (int k = 0; k < kUnits; ++k) {
          if (from[k] >= 0) from[k] += kAtOnce * kDepthWords;
        }
      }
      __syncwarp();
#pragma unroll
      for (int k = 0; k < kUnits; ++k) {
        const int unit = base + k * kChangers;
        if (unit >= all) break;
        mbar_wait(landed + k * 8, phase);
        const u32 slot = slots + k * kOwnSlot;
        const int valid = columns - (unit & ((1 << log) - 1)) * kSpan;  // a multiple of 8
        const u32 x = pack_bf16(low[k][0], low[k][1]), y = pack_bf16(low[k][2], low[k][3]);
        uint2 b[kSpan / 8];
#pragma unroll
        for (int j = 0; j < kSpan / 8; ++j) b[j] = load_shared8(slot + j * (8 * kRanks * 2));
        float sums[kSpan / 16][4] = {};
#pragma unroll
        for (int j = 0; j < kSpan / 16; ++j) {
          const u32 columns_of[4] = {b[2 * j].x, b[2 * j + 1].x, b[2 * j].y, b[2 * j + 1].y};
          mma_bf16(sums[j], columns_of, x, y);
        }
#pragma unroll
        for (int r = 0; r < 2; ++r) {
          if ((own >> (2 * k + r) & 1) == 0) continue;
          const u32 at = to_all + to[k] + r * kPitch * 4;
#pragma unroll
          for (int j = 0; j < kSpan / 16; ++j) {
            if (j * 16 < valid) store_shared4(at + j * 64, sums[j][r]);
            if (j * 16 + 8 < valid) store_shared4(at + j * 64 + 32, sums[j][r + 2]);
          }
        }
        if (unit + kChangers * kUnits >= all) continue;
        __syncwarp();
        if (lane == 0) ask_sixteen(unit + kChangers * kUnits, warp, k, shared);
      }
    }
  }
};

#else

template <int kPitch, int kUnits, int kSteps>
struct ChangedTile;

#endif

}  // namespace heddle::ops::cuda::batch_row
