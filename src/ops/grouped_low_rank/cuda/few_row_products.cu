// Narrow products of sets of up to 64 rows: few steps of depth, each as large as memory likes it.
//
// A tile: all rows of a set x 64 columns. A warp has 32 of the rows and 16 of a step's depth, so
// that a step of 32 rows is 128 deep and one of 64 rows 64. The warps' sums are added up in order
// when all steps are done, then those of the CTAs of a cluster. dy^T low, if it is asked for, is 16
// rows of a step's depth a warp (half of their columns with 64 rows).
#include "ops/grouped_low_rank/cuda/narrow_table.cuh"

namespace heddle::ops::cuda {
namespace {

constexpr int kThreads = 256, kWarps = kThreads / 32;

template <NarrowForm form, int kRowGroups>
struct FewRows {
  static constexpr int kRows = 32 * kRowGroups, kDepthGroups = kWarps / kRowGroups,
                       kDepth = 16 * kDepthGroups, kStages = kRowGroups == 1 ? 3 : 4;
  static constexpr bool kIsDeep = form == NarrowForm::kDeep;
  static constexpr int kTallPitch = kDepth + 8,
                       kNarrowPitch = (kIsDeep ? kNarrowColumns : kDepth) + 8,
                       kLowPitch = kNarrowColumns + 8;
  static constexpr u32 kTallBytes = kRows * kTallPitch * 2,
                       kNarrowBytes = (kIsDeep ? kDepth : kNarrowColumns) * kNarrowPitch * 2,
                       kStageBytes = kTallBytes + kNarrowBytes,
                       kLow = kStages * kStageBytes;        ///< Where low begins.
  static constexpr u32 kSumBytes = kRows * kLinePitch * 4;  ///< Sums of a group of the depth.
  static constexpr u32 kBytes = kLow + (kIsDeep ? kRows * kLowPitch * 2 : 0);
  static_assert(kDepthGroups * kSumBytes <= kBytes && 2 * kBytes <= 227 * 1024);

#if __CUDA_ARCH__ >= 900

  const NarrowEntry& e;
  int n0;

  __device__ __forceinline__ int columns() const { return min(e.n - n0, kNarrowColumns); }

  /// A stage of either matrix, of which a line has kRuns runs of 8: a thread's runs lie kThreads /
  /// kRuns lines apart. A copy of no bytes, where is_in(line, run) says so, writes zeros.
  template <int kRuns, int kLines, int kPitch, class F>
  __device__ __forceinline__ static void copy_lines(u32 to, const bf16* from, int64_t stride,
                                                    int lines, const F& is_in) {
    constexpr int kApart = kThreads / kRuns;
    const int line = threadIdx.x / kRuns, run = threadIdx.x % kRuns;
    const bf16* at = from + line * stride + run * 8;
    u32 place = to + (line * kPitch + run * 8) * 2;
#pragma unroll
    for (int i = 0; i < kLines / kApart; ++i) {
      if (line + i * kApart < lines) cp_async16(place, at, is_in(line + i * kApart, run));
      at += kApart * stride;
      place += kApart * kPitch * 2;
    }
  }
  /// Copies of matrices whose lines begin anywhere.
  __device__ __forceinline__ void copy_narrow_slowly(u32 narrow, int k0, int own,
                                                     int wanted) const {
    constexpr int kRuns = kNarrowPitch / 8 - 1;
    for (int i = threadIdx.x; i < (kIsDeep ? kDepth : wanted) * kRuns; i += kThreads) {
      const int line = i / kRuns, at = i % kRuns * 8;
      if (kIsDeep && at >= wanted) continue;
      const bool is_in = kIsDeep ? k0 + line < e.k && at < own : line < own && k0 + at < e.k;
      const int64_t from = kIsDeep ? static_cast<int64_t>(k0 + line) * e.narrow_stride + n0 + at
                                   : static_cast<int64_t>(n0 + line) * e.narrow_stride + k0 + at;
      copy8(narrow + (line * kNarrowPitch + at) * 2, e.narrow + (is_in ? from : 0),
            !is_in    ? 0
            : kIsDeep ? own - at
                      : e.k - k0 - at,
            false);
    }
  }

  __device__ __forceinline__ void load(u32 stage, int step) const {
    const int k0 = step * kDepth, own = columns(), wanted = tiles_along(own, 16) * 16;
    copy_lines<kDepth / 8, kRows, kTallPitch>(
        stage, e.tall + k0, e.tall_stride, kRows,
        [&](int row, int run) { return row < e.m && k0 + run * 8 < e.k; });
    const u32 narrow = stage + kTallBytes;
    if (!e.is_aligned) {
      copy_narrow_slowly(narrow, k0, own, wanted);
    } else if constexpr (kIsDeep) {
      if (threadIdx.x % (kNarrowColumns / 8) * 8 >= wanted) return;
      copy_lines<kNarrowColumns / 8, kDepth, kNarrowPitch>(
          narrow, e.narrow + static_cast<int64_t>(k0) * e.narrow_stride + n0, e.narrow_stride,
          kDepth, [&](int line, int run) { return k0 + line < e.k && run * 8 < own; });
    } else {
      copy_lines<kDepth / 8, kNarrowColumns, kNarrowPitch>(
          narrow, e.narrow + static_cast<int64_t>(n0) * e.narrow_stride + k0, e.narrow_stride,
          wanted, [&](int line, int run) { return line < own && k0 + run * 8 < e.k; });
    }
  }

  __device__ __forceinline__ void load_low(u32 low) const {
    constexpr int kRuns = kNarrowColumns / 8;
    for (int i = threadIdx.x; i < kRows * kRuns; i += kThreads) {
      const int row = i / kRuns, column = i % kRuns * 8;
      const bool is_in = row < e.m && column < columns();
      cp_async16(low + (row * kLowPitch + column) * 2,
                 is_in ? e.low + static_cast<int64_t>(row) * e.low_stride + n0 + column : e.low,
                 is_in);
    }
  }

  template <int NB>
  __device__ __forceinline__ void multiply(float (&sums)[2][NB][4], u32 stage) const {
    const int warp = threadIdx.x / 32, lane = threadIdx.x % 32, m = lane >> 3, r = lane & 7;
    const int row = warp % kRowGroups * 32, k = warp / kRowGroups * 16;
    const u32 narrow = stage + kTallBytes;
    u32 left[2][4];
#pragma unroll
    for (int i = 0; i < 2; ++i)
      ldmatrix4(left[i],
                stage + ((row + i * 16 + (m & 1) * 8 + r) * kTallPitch + k + (m >> 1) * 8) * 2);
#pragma unroll
    for (int n = 0; n < NB; n += 2) {
      u32 right[4];
      if constexpr (kIsDeep) {
        ldmatrix4_trans(right,
                        narrow + ((k + (m & 1) * 8 + r) * kNarrowPitch + n * 8 + (m >> 1) * 8) * 2);
      } else {
        ldmatrix4(right,
                  narrow + ((n * 8 + (m >> 1) * 8 + r) * kNarrowPitch + k + (m & 1) * 8) * 2);
      }
#pragma unroll
      for (int i = 0; i < 2; ++i) {
        mma_bf16(sums[i][n], left[i], right[0], right[1]);
        mma_bf16(sums[i][n + 1], left[i], right[2], right[3]);
      }
    }
  }

  /// A thread's gradients of a block of 16 lines: pairs of columns, 8 apart.
  template <int N>
  __device__ __forceinline__ void put_block(int row, int column, const float (&sums)[N][4]) const {
    if (e.n % 2 != 0) {
#pragma unroll
      for (int n = 0; n < N; ++n) {
        put_gradients(e, row, column + n * 8, sums[n][0], sums[n][1]);
        put_gradients(e, row + 8, column + n * 8, sums[n][2], sums[n][3]);
      }
      return;
    }
    auto* line = reinterpret_cast<float2*>(e.gradient + static_cast<int64_t>(row) * e.n + column);
#pragma unroll
    for (int half = 0; half < 2; ++half, line += 4 * e.n) {
      if (row + 8 * half >= e.k) return;
#pragma unroll
      for (int n = 0; n < N; ++n) {
        if (column + n * 8 >= e.n) break;
        float2 sum = make_float2(sums[n][2 * half], sums[n][2 * half + 1]);
        if (e.accumulates) {
          const float2 before = line[n * 4];
          sum = make_float2(before.x + sum.x, before.y + sum.y);
        }
        line[n * 4] = sum;
      }
    }
  }

  /// tall^T low of the columns of tall in `stage`, which are `step`'s.
  template <int NB>
  __device__ __forceinline__ void put_gradient(u32 stage, u32 low, int step) const {
    constexpr int kBlocks = kDepth / 16, kShares = kWarps / kBlocks,
                  kPairs = NB / 2 >= kShares ? NB / 2 / kShares : 1,
                  kAtOnce = kPairs < 2 ? kPairs : 2;  // more of them want too many registers
    const int warp = threadIdx.x / 32, lane = threadIdx.x % 32, m = lane >> 3, r = lane & 7;
    const int block = warp % kBlocks * 16, first_pair = warp / kBlocks * kPairs;
    if (first_pair * 2 >= NB) return;
    const int rows = tiles_along(e.m, 16) * 16, row = step * kDepth + block + (lane >> 2);
    const u32 left_at = stage + (((m >> 1) * 8 + r) * kTallPitch + block + (m & 1) * 8) * 2,
              right_at = low + (((m & 1) * 8 + r) * kLowPitch + (m >> 1) * 8) * 2;
#pragma unroll 1
    for (int pair = first_pair; pair < first_pair + kPairs; pair += kAtOnce) {
      float sums[2 * kAtOnce][4];
      zero(sums);
      for (int k = 0; k < rows; k += 16) {
        u32 left[4];
        ldmatrix4_trans(left, left_at + k * kTallPitch * 2);
#pragma unroll
        for (int i = 0; i < kAtOnce; ++i) {
          u32 right[4];
          ldmatrix4_trans(right, right_at + (k * kLowPitch + (pair + i) * 16) * 2);
          mma_bf16(sums[2 * i], left, right[0], right[1]);
          mma_bf16(sums[2 * i + 1], left, right[2], right[3]);
        }
      }
      put_block(row, n0 + pair * 16 + (lane & 3) * 2, sums);
    }
  }

  /// The sums of steps [first, last) to the beginning of shared memory, and gradients if they are
  /// asked for.
  template <int NB, bool has_gradient>
  __device__ __forceinline__ void sum(unsigned char* memory, int first, int last) const {
    const u32 stages = smem_u32(memory);
    float sums[2][NB][4];
    zero(sums[0]);
    zero(sums[1]);
    if constexpr (has_gradient) load_low(stages + kLow);
    each_step<kStages, kStageBytes>(
        stages, first, last, [&](u32 stage, int step) { load(stage, step); },
        [&](u32 stage, int step) {
          multiply(sums, stage);
          if constexpr (has_gradient) put_gradient<NB>(stage, stages + kLow, step);
        });
    auto* const all = reinterpret_cast<float*>(memory);
    const int warp = threadIdx.x / 32, lane = threadIdx.x % 32;
    float* const own = all + warp / kRowGroups * (kSumBytes / 4);
#pragma unroll
    for (int i = 0; i < 2; ++i) {
      const int row = warp % kRowGroups * 32 + i * 16 + (lane >> 2);
#pragma unroll
      for (int n = 0; n < NB; ++n) {
        float* const at = own + row * kLinePitch + n * 8 + (lane & 3) * 2;
        *reinterpret_cast<float2*>(at) = make_float2(sums[i][n][0], sums[i][n][1]);
        *reinterpret_cast<float2*>(at + 8 * kLinePitch) = make_float2(sums[i][n][2], sums[i][n][3]);
      }
    }
    __syncthreads();
    constexpr int kQuads = NB * 2;
    for (int i = threadIdx.x; i < e.m * kQuads; i += kThreads) {
      auto* const at = reinterpret_cast<float4*>(all + i / kQuads * kLinePitch + i % kQuads * 4);
      float4 total = *at;
#pragma unroll
      for (int group = 1; group < kDepthGroups; ++group) {
        const float4 next = at[group * (kSumBytes / 16)];
        total = make_float4(total.x + next.x, total.y + next.y, total.z + next.z, total.w + next.w);
      }
      *at = total;
    }
  }

  template <int NB>
  __device__ __forceinline__ void sum(unsigned char* memory, int first, int last) const {
    if constexpr (kIsDeep) {
      if (e.gradient != nullptr) return sum<NB, true>(memory, first, last);
    }
    sum<NB, false>(memory, first, last);
  }

  __device__ __forceinline__ void compute(unsigned char* memory, int part, int parts) const {
    const int steps = tiles_along(e.k, kDepth), each = tiles_along(steps, parts),
              first = min(part * each, steps), last = min(first + each, steps);
    if (columns() <= 16) {
      sum<2>(memory, first, last);
    } else if (columns() <= 32) {
      sum<4>(memory, first, last);
    } else {
      sum<8>(memory, first, last);
    }
    meet(parts);
    put_lows(e, 0, n0, e.m, smem_u32(memory), part, parts);
    // Nobody's memory is written again before all have read it.
    meet(parts);
  }

#endif
};

template <NarrowForm form, int kRowGroups>
__global__ void __launch_bounds__(kThreads, 2)
    few_rows_kernel(const __grid_constant__ NarrowTable table) {
#if __CUDA_ARCH__ >= 900
  extern __shared__ __align__(128) unsigned char memory[];
  each_tile(table, [&](const NarrowEntry& e, int tile, int part, int parts) {
    FewRows<form, kRowGroups>{e, tile * kNarrowColumns}.compute(memory, part, parts);
  });
#endif
}

template <NarrowForm form, int kRowGroups>
struct FewRowsKernel {
  static constexpr int kThreads = cuda::kThreads, kDepth = FewRows<form, kRowGroups>::kDepth,
                       kStepsOfATile = 4;
  static constexpr u32 kBytes = FewRows<form, kRowGroups>::kBytes;
  static auto get() { return few_rows_kernel<form, kRowGroups>; }
};

template <NarrowForm form>
void launch(int most_rows, NarrowTable& table, cudaStream_t stream) {
  most_rows <= 32 ? launch_narrow<FewRowsKernel<form, 1>>(table, stream)
                  : launch_narrow<FewRowsKernel<form, 2>>(table, stream);
}

}  // namespace

void launch_few_rows(NarrowForm form, int most_rows, NarrowTable& table, cudaStream_t stream) {
  form == NarrowForm::kRows ? launch<NarrowForm::kRows>(most_rows, table, stream)
                            : launch<NarrowForm::kDeep>(most_rows, table, stream);
}

}  // namespace heddle::ops::cuda
