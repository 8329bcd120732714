// A tile: 128 x 64 of one product, 64 in depth a step, by mma.sync; warp w has rows 16 w... The
// CTAs that the device holds at once go over the tiles, the deepest first. Where these are few, a
// tile is cut along its depth over the CTAs of a cluster, which add their sums up in order through
// each other's shared memory. A tile of dy b that has all rows of its set also makes dy^T low,
// whose sums each step of depth completes.
//
// Shared memory: 4 stages of both tiles, rows 16 bytes longer than they are, which ldmatrix reads
// without conflicts, or 3 and low; then the sums in fp32 in the same place, in lines that lie as in
// the result.
#include <algorithm>
#include <cstdint>

#include "ops/grouped_low_rank/cuda/narrow_table.cuh"

namespace heddle::ops::cuda {
namespace {

constexpr int kTileM = 128, kTileN = kNarrowColumns, kDepth = 64, kStages = 4, kThreads = 256;
constexpr int kTallBytes =
    kTileM * (kDepth + 8) * 2;  // or kDepth * (kTileM + 8) * 2, which is less
constexpr int kNarrowBytes = kTileN * (kDepth + 8) * 2;
constexpr int kStageBytes = kTallBytes + kNarrowBytes;
constexpr int kTurnedPitch = kTileM + 4;  // of sums, beside kLinePitch
static_assert(kTileM * kLinePitch * 4 <= kStages * kStageBytes);
static_assert(kTileN * kTurnedPitch * 4 <= kStages * kStageBytes);
constexpr int kStagesBesideLow = 3;
constexpr u32 kLow = kStagesBesideLow * kStageBytes;  // where low begins, in rows as of a stage
static_assert(kLow + kTileM * (kDepth + 8) * 2 <= kStages * kStageBytes);
static_assert(kMostRowsOfBoth == kTileM && kTileN == kDepth);
constexpr u32 kSharedBytes = kStages * kStageBytes;

#if __CUDA_ARCH__ >= 900

/// One tile of an entry.
template <NarrowForm form>
struct Tile {
  const NarrowEntry& e;
  int m0, n0;

  __device__ __forceinline__ void load(u32 stage, int step) const {
    const int k0 = step * kDepth;
    const u32 narrow = stage + kTallBytes;
    if constexpr (form == NarrowForm::kGradients) {
      constexpr int kRuns = kTileM / 8;
      for (int i = threadIdx.x; i < kDepth * kRuns; i += kThreads) {
        const int row = i / kRuns, column = i % kRuns * 8;
        const bool is_in = k0 + row < e.k && m0 + column < e.m;
        cp_async16(stage + (row * (kTileM + 8) + column) * 2,
                   is_in ? e.tall + (k0 + row) * e.tall_stride + m0 + column : e.tall, is_in);
      }
    } else {
      constexpr int kRuns = kDepth / 8;
      for (int i = threadIdx.x; i < kTileM * kRuns; i += kThreads) {
        const int row = i / kRuns, column = i % kRuns * 8;
        const bool is_in = m0 + row < e.m && k0 + column < e.k;
        cp_async16(stage + (row * (kDepth + 8) + column) * 2,
                   is_in ? e.tall + (m0 + row) * e.tall_stride + k0 + column : e.tall, is_in);
      }
    }
    constexpr int kRuns = kDepth / 8;  // both sides of the narrow tile are as long
    const int columns = min(e.n - n0, kTileN);
    for (int i = threadIdx.x; i < kDepth * kRuns; i += kThreads) {
      const int row = i / kRuns, column = i % kRuns * 8;
      const u32 to = narrow + (row * (kDepth + 8) + column) * 2;
      if constexpr (form == NarrowForm::kRows) {  // rows are n
        if (row >= tiles_along(columns, 16) * 16) break;
        const bool is_in = row < columns && k0 + column < e.k;
        copy8(to,
              e.narrow + static_cast<int64_t>(is_in ? n0 + row : 0) * e.narrow_stride +
                  (is_in ? k0 + column : 0),
              is_in ? e.k - k0 - column : 0, e.is_aligned);
      } else {  // rows are k
        if (column >= tiles_along(columns, 16) * 16) continue;
        const bool is_in = k0 + row < e.k && column < columns;
        copy8(to,
              e.narrow + static_cast<int64_t>(is_in ? k0 + row : 0) * e.narrow_stride +
                  (is_in ? n0 + column : 0),
              is_in ? (form == NarrowForm::kGradients ? 8 : columns - column) : 0, e.is_aligned);
      }
    }
  }

  template <int NB>
  __device__ __forceinline__ void multiply(float (&sums)[NB][4], u32 stage) const {
    const int warp = threadIdx.x / 32, lane = threadIdx.x % 32, m = lane >> 3, r = lane & 7;
    const u32 narrow = stage + kTallBytes;
#pragma unroll
    for (int k = 0; k < kDepth; k += 16) {
      u32 left[4];
      if constexpr (form == NarrowForm::kGradients) {
        ldmatrix4_trans(
            left, stage + ((k + (m >> 1) * 8 + r) * (kTileM + 8) + warp * 16 + (m & 1) * 8) * 2);
      } else {
        ldmatrix4(left,
                  stage + ((warp * 16 + (m & 1) * 8 + r) * (kDepth + 8) + k + (m >> 1) * 8) * 2);
      }
#pragma unroll
      for (int n = 0; n < NB; n += 2) {
        u32 right[4];
        if constexpr (form == NarrowForm::kRows) {
          ldmatrix4(right,
                    narrow + ((n * 8 + (m >> 1) * 8 + r) * (kDepth + 8) + k + (m & 1) * 8) * 2);
        } else {
          ldmatrix4_trans(
              right, narrow + ((k + (m & 1) * 8 + r) * (kDepth + 8) + n * 8 + (m >> 1) * 8) * 2);
        }
        mma_bf16(sums[n], left, right[0], right[1]);
        mma_bf16(sums[n + 1], left, right[2], right[3]);
      }
    }
  }

  __device__ __forceinline__ void load_low(u32 to) const {
    const int columns = min(e.n - n0, kTileN);
    constexpr int kRuns = kTileN / 8;
    for (int i = threadIdx.x; i < kTileM * kRuns; i += kThreads) {
      const int row = i / kRuns, column = i % kRuns * 8;
      const bool is_in = row < e.m && column < columns;
      cp_async16(to + (row * (kTileN + 8) + column) * 2,
                 is_in ? e.low + static_cast<int64_t>(row) * e.low_stride + n0 + column : e.low,
                 is_in);
    }
  }

  /// tall^T low of the columns of tall in `stage`, which are `step`'s. Warp w has 16 (w % 4)...,
  /// and half of the columns of low.
  template <int NB>
  __device__ __forceinline__ void put_gradient(u32 stage, u32 low, int step) const {
    constexpr int kPairs = NB >= 4 ? NB / 4 : 1;
    const int warp = threadIdx.x / 32, lane = threadIdx.x % 32, m = lane >> 3, r = lane & 7;
    const int first_pair = warp / 4 * kPairs;
    if (first_pair * 2 >= NB) return;
    float sums[2 * kPairs][4];
    zero(sums);
    const int rows = tiles_along(e.m, 16) * 16;
    for (int k = 0; k < rows; k += 16) {
      u32 left[4];
      ldmatrix4_trans(
          left, stage + ((k + (m >> 1) * 8 + r) * (kDepth + 8) + warp % 4 * 16 + (m & 1) * 8) * 2);
#pragma unroll
      for (int pair = 0; pair < kPairs; ++pair) {
        u32 right[4];
        ldmatrix4_trans(right, low + ((k + (m & 1) * 8 + r) * (kTileN + 8) +
                                      (first_pair + pair) * 16 + (m >> 1) * 8) *
                                         2);
        mma_bf16(sums[2 * pair], left, right[0], right[1]);
        mma_bf16(sums[2 * pair + 1], left, right[2], right[3]);
      }
    }
    const int row = step * kDepth + warp % 4 * 16 + (lane >> 2),
              column = n0 + first_pair * 16 + (lane & 3) * 2;
#pragma unroll
    for (int n = 0; n < 2 * kPairs; ++n) {
      put_gradients(e, row, column + n * 8, sums[n][0], sums[n][1]);
      put_gradients(e, row + 8, column + n * 8, sums[n][2], sums[n][3]);
    }
  }
  /// The sums of steps [first, last) to shared memory, and gradients if they are asked for.
  template <int NB, int Stages, bool has_gradient>
  __device__ __forceinline__ void sum(u32 memory, float* to, int first, int last) const {
    float sums[NB][4];
    zero(sums);
    if constexpr (has_gradient) load_low(memory + kLow);
    each_step<Stages, kStageBytes>(
        memory, first, last, [&](u32 stage, int step) { load(stage, step); },
        [&](u32 stage, int step) {
          multiply(sums, stage);
          if constexpr (has_gradient) put_gradient<NB>(stage, memory + kLow, step);
        });
    const int lane = threadIdx.x % 32, row = threadIdx.x / 32 * 16 + (lane >> 2),
              column = (lane & 3) * 2;
#pragma unroll
    for (int n = 0; n < NB; ++n) {
      if (form == NarrowForm::kGradients && e.turned) {
        float* const at = to + (n * 8 + column) * kTurnedPitch + row;
        at[0] = sums[n][0];
        at[kTurnedPitch] = sums[n][1];
        at[8] = sums[n][2];
        at[kTurnedPitch + 8] = sums[n][3];
      } else {
        float* const at = to + row * kLinePitch + n * 8 + column;
        *reinterpret_cast<float2*>(at) = make_float2(sums[n][0], sums[n][1]);
        *reinterpret_cast<float2*>(at + 8 * kLinePitch) = make_float2(sums[n][2], sums[n][3]);
      }
    }
  }
};

/// Up to four of a line of fp32.
__device__ __forceinline__ void put(float* out, float4 sum, int count, bool accumulates) {
  if (count == 4 && reinterpret_cast<uintptr_t>(out) % 16 == 0) {
    auto* const all = reinterpret_cast<float4*>(out);
    if (accumulates) {
      const float4 before = *all;
      sum = make_float4(before.x + sum.x, before.y + sum.y, before.z + sum.z, before.w + sum.w);
    }
    *all = sum;
    return;
  }
  const float sums[4] = {sum.x, sum.y, sum.z, sum.w};
#pragma unroll
  for (int i = 0; i < 4; ++i)
    if (i < count) out[i] = accumulates ? out[i] + sums[i] : sums[i];
}

template <NarrowForm form, int NB>
__device__ __forceinline__ void sum(const Tile<form>& work, unsigned char* memory, int first,
                                    int last) {
  auto* const sums = reinterpret_cast<float*>(memory);
  if constexpr (form == NarrowForm::kDeep) {
    if (work.e.gradient != nullptr)
      return work.template sum<NB, kStagesBesideLow, true>(smem_u32(memory), sums, first, last);
  }
  work.template sum<NB, kStages, false>(smem_u32(memory), sums, first, last);
}

template <NarrowForm form>
__device__ void compute(const NarrowEntry& e, int place, unsigned char* memory, int part,
                        int parts) {
  const int rows = tiles_along(e.m, kTileM);
  const Tile<form> work{e, place % rows * kTileM, place / rows * kTileN};
  const int steps = tiles_along(e.k, kDepth), each = tiles_along(steps, parts),
            first = min(part * each, steps), last = min(first + each, steps);
  const int columns = min(e.n - work.n0, kTileN);
  if (columns <= 16) {
    sum<form, 2>(work, memory, first, last);
  } else if (columns <= 32) {
    sum<form, 4>(work, memory, first, last);
  } else {
    sum<form, 8>(work, memory, first, last);
  }
  meet(parts);
  // Each part writes its share.
  const u32 from = smem_u32(memory);
  const int rows_here = min(e.m - work.m0, kTileM), begin = part * kThreads + threadIdx.x,
            stride = parts * kThreads;
  if constexpr (form == NarrowForm::kGradients) {
    const int lines = e.turned ? columns : rows_here, length = e.turned ? rows_here : columns,
              pitch = e.turned ? kTurnedPitch : kLinePitch,
              bits = e.turned        ? 5
                     : columns <= 16 ? 2
                     : columns <= 32 ? 3
                                     : 4;  // of quads a line
    float* const out = static_cast<float*>(e.out) +
                       (e.turned ? static_cast<int64_t>(work.n0) * e.out_stride + work.m0
                                 : static_cast<int64_t>(work.m0) * e.out_stride + work.n0);
    for (int i = begin; i < lines << bits; i += stride) {
      const int line = i >> bits, at = (i & ((1 << bits) - 1)) * 4;
      if (at >= length) continue;
      float4 sum = joined(from + (line * pitch + at) * 4, parts);
      sum = make_float4(e.scale * sum.x, e.scale * sum.y, e.scale * sum.z, e.scale * sum.w);
      put(out + static_cast<int64_t>(line) * e.out_stride + at, sum, min(length - at, 4),
          e.accumulates);
    }
  } else {
    put_lows(e, work.m0, work.n0, rows_here, from, part, parts);
  }
  // Nobody's memory is written again before all have read it.
  meet(parts);
}

#endif

template <NarrowForm form>
__global__ void __launch_bounds__(kThreads, 2)
    narrow_kernel(const __grid_constant__ NarrowTable table) {
#if __CUDA_ARCH__ >= 900
  extern __shared__ __align__(128) unsigned char memory[];
  each_tile(table, [&](const NarrowEntry& e, int tile, int part, int parts) {
    compute<form>(e, tile, memory, part, parts);
  });
#endif
}

template <NarrowForm form>
struct NarrowKernel {
  static constexpr int kThreads = cuda::kThreads, kDepth = cuda::kDepth, kStepsOfATile = 6;
  static constexpr u32 kBytes = kSharedBytes;
  static auto get() { return narrow_kernel<form>; }
};

void launch(NarrowForm form, NarrowTable& table, cudaStream_t stream) {
  switch (form) {
    case NarrowForm::kRows:
      return launch_narrow<NarrowKernel<NarrowForm::kRows>>(table, stream);
    case NarrowForm::kDeep:
      return launch_narrow<NarrowKernel<NarrowForm::kDeep>>(table, stream);
    case NarrowForm::kGradients:
      return launch_narrow<NarrowKernel<NarrowForm::kGradients>>(table, stream);
  }
}

}  // namespace

void narrow_products(NarrowForm form, const std::vector<NarrowProduct>& products,
                     cudaStream_t stream) {
  std::vector<const NarrowProduct*> deepest_first;
  for (const NarrowProduct& p : products)
    if (p.m > 0 && p.n > 0) deepest_first.push_back(&p);
  std::stable_sort(deepest_first.begin(), deepest_first.end(),
                   [](const NarrowProduct* a, const NarrowProduct* b) { return a->k > b->k; });
  int most_rows = 0;
  for (const NarrowProduct* p : deepest_first) most_rows = std::max(most_rows, p->m);
  const bool has_few_rows = form != NarrowForm::kGradients && most_rows <= kMostFewRows;
  NarrowTable table{};
  for (std::size_t i = 0; i < deepest_first.size(); ++i) {
    const NarrowProduct& p = *deepest_first[i];
    table.entries[table.count++] = {static_cast<const bf16*>(p.tall),
                                    static_cast<const bf16*>(p.narrow),
                                    p.out,
                                    p.tall_stride,
                                    static_cast<int32_t>(p.narrow_stride),
                                    static_cast<int32_t>(p.out_stride),
                                    p.m,
                                    p.k,
                                    p.n,
                                    table.tiles,
                                    p.scale,
                                    p.turned,
                                    p.accumulates,
                                    begins_on_16_bytes(p.narrow, p.narrow_stride),
                                    static_cast<const bf16*>(p.low),
                                    p.gradient,
                                    static_cast<int32_t>(p.low_stride)};
    table.tiles += tiles_along(p.m, kTileM) * tiles_along(p.n, kTileN);  // one along few rows
    if (table.count < kNarrowEntries && i + 1 < deepest_first.size()) continue;
    has_few_rows ? launch_few_rows(form, most_rows, table, stream) : launch(form, table, stream);
    table.count = table.tiles = 0;
  }
}

}  // namespace heddle::ops::cuda
