// Low-rank changes of the products of a batch's rows (batch_rows.cu says how the launch goes): the
// warps of a CTA that make some of the lows, wait for the others, and multiply them by B.
#pragma once

#include "ops/linear/cuda/few_row_changes.cuh"

namespace heddle::ops::cuda::few_row {

constexpr int kMostRuns = 64, kChangers = 8;  ///< Runs of rows with one set; warps of a CTA.

/// Runs with a change that have rows in the CTA's part; their order does not matter.
struct ChangeJobs {
  RunOfChange runs[2 * kMostRuns];
  int count;
  LowShared<kChangers> lows;
};

/// The columns [first, first + columns) of a sum (gated: of both its layers) for the rows
/// [row_base, row_base + rows).
struct ChangedTile {
  const Arguments& p;
  const FewRowSum& sum;
  int first, columns, row_base, rows;

  /// Changes [rows, kPitch] by kChangers warps, zeros where there is none; of a gated sum those of
  /// the second layer follow the first one's columns.
  template <int kPitch, int kAheadOfLows>
  __device__ __forceinline__ void make(int thread, ChangeJobs& jobs, float* changes) const {
    constexpr int kThreads = kChangers * 32, kSpan = 64;
    for (int i = thread; i < rows * kPitch; i += kThreads) changes[i] = 0;
    if (thread == 0) jobs.count = 0;
    named_sync(4, kThreads);
    const int runs = p.slots.runs != nullptr ? p.slots.count : kMostRuns / 8,
              layers = sum.up != nullptr ? 2 : 1;
    for (int i = thread; i < runs * layers; i += kThreads) {
      const int layer = i / runs;
      const RunOfChange run =
          run_of(p, layer == 0 ? sum.change : sum.up_change, layer, i - layer * runs);
      if (run.rows <= 0 || run.rank == 0 || run.first >= row_base + rows ||
          run.first + run.rows <= row_base)
        continue;
      jobs.runs[atomicAdd(&jobs.count, 1)] = run;
      const int valid = min(columns, sum.columns - first);
      if (run.b_stride == run.rank && run.rank % 8 == 0 && valid > 0)
        bring_near(run.b + first * run.b_stride, static_cast<u32>(valid * run.rank * 2));
    }
    const auto sync = [] { named_sync(4, kThreads); };
    sync();
    // The first CTAs, which the device holds all at once, make the lows.
    const int own = static_cast<int>(blockIdx.x);
    for (int i = own < p.makers ? own : p.low_blocks; i < p.low_blocks; i += p.makers)
      make_low<kMostRuns / 8, kChangers, kAheadOfLows>(p, jobs.lows, i, thread, sync);
    wait_for_previous();
    wait_for_lows(p);
    sync();
    if (thread == 0) leave_lows(p, gridDim.x);
    const int spans = (columns + kSpan - 1) / kSpan;
    for (int i = thread / 32; i < jobs.count * spans; i += kChangers)
      add<kPitch>(jobs.runs[i / spans], i % spans * kSpan, changes);
  }

 private:
  /// 64 columns of a run's change. Lane 4 g + t has rows 2 t and 2 t + 1 of columns 8 g to 8 g + 7.
  template <int kPitch>
  __device__ __forceinline__ void add(const RunOfChange& run, int span, float* changes) const {
    const int lane = threadIdx.x % 32, g = lane / 4, t = lane % 4, own = span + 8 * g,
              column = first + own, valid = own < columns ? sum.columns - column : 0;
    const FewRowChange& change = run.which == 0 ? sum.change : sum.up_change;
    const bf16* const low =
        static_cast<const bf16*>(change.low) + (run.first + g) * change.low_stride;
    float sums[4][4] = {};
    for (int at = 4 * t; at - 4 * t < run.rank; at += 16) {
      uint2 b[4][2], x = make_uint2(0, 0);
#pragma unroll
      for (int j = 0; j < 8; ++j)
        b[j / 2][j % 2] =
            load_factor4(run.b + (column + j) * run.b_stride, at, run.rank, j < valid);
      if (g < run.rows) x = __ldcg(reinterpret_cast<const uint2*>(low + at));
#pragma unroll
      for (int j = 0; j < 4; ++j) {
        const u32 columns_of[4] = {b[j][0].x, b[j][1].x, b[j][0].y, b[j][1].y};
        mma_bf16(sums[j], columns_of, x.x, x.y);
      }
    }
#pragma unroll
    for (int r = 0; r < 2; ++r) {
      const int row = run.first + 2 * t + r - row_base;
      if (2 * t + r >= run.rows || row < 0 || row >= rows || valid <= 0) continue;
      float* const to = changes + row * kPitch + run.which * columns + own;
#pragma unroll
      for (int j = 0; j < 8; ++j) to[j] = sums[j / 2][r + j % 2 * 2];
    }
  }
};

}  // namespace heddle::ops::cuda::few_row
