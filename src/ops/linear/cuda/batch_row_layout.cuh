// How a launch of the products of a batch's rows lies in shared memory, and what a CTA works on
// (batch_rows.cu says how the launch goes).
#pragma once

#include "ops/cuda/cta_pair.cuh"
#include "ops/cuda/dependent_launch.cuh"
#include "ops/cuda/mma.cuh"
#include "ops/linear/cuda/batch_rows.h"
#include "ops/linear/cuda/few_row_changes.cuh"

namespace heddle::ops::cuda::batch_row {

constexpr int kDepth = 64, kScalers = 4, kMostSplit = kMostBatchRowParts, kGroupColumns = 64;
constexpr u32 kMatrixBytes = kGroupColumns * kDepth * 2;

/// Low-rank changes of a launch; gated: of the two layers of a gated sum.
enum class Changes {
  kNone,
  kOneSet,  ///< Rows that have a change have the same set's, of ranks up to kLowColumns.
  kOneSetGated,
  kRuns,  ///< Runs of rows, each with a set of its own.
  kRunsGated,
};
constexpr bool has_runs(Changes c) { return c == Changes::kRuns || c == Changes::kRunsGated; }
constexpr bool is_gated(Changes c) {
  return c == Changes::kOneSetGated || c == Changes::kRunsGated;
}
/// Warps that multiply rows by A, and columns of a tile of the lows.
constexpr int kLowWarps = 2, kLowColumns = few_row::kColumns;
constexpr u32 kLowBytes = kLowColumns * kDepth * 2;
constexpr int kMostRuns = 64, kLayers = 2;  ///< Runs of rows with one set; layers of a sum.

/// Tiles of the lows that a CTA makes while the rows pass by.
constexpr int low_tiles(Changes c) {
  return c == Changes::kNone ? 0 : has_runs(c) ? 4 : is_gated(c) ? kLayers : 1;
}

/// Which runs of rows have which B, in shared memory.
struct ChangeTable {
  static constexpr int kNoRun = 255;
  struct Run {
    const bf16* b;
    int b_stride, rank;  ///< Rank 0: no change.
    float scale;
  };
  Run runs[kLayers][kMostRuns];
  unsigned char of_row[kMostBatchRows];  ///< Number of a row's run, or kNoRun.
  unsigned char after[kMostBatchRows];   ///< The first row that is not of its run.
};

/// kRows: of a, rounded up; kGroups: multiplying warpgroups.
template <int kRows, int kGroups, Changes kChanges>
struct Layout {
  static constexpr bool kIsChanged = kChanges != Changes::kNone;
  static constexpr bool kHasRuns = has_runs(kChanges), kIsGated = is_gated(kChanges);
  static constexpr int kTiles = low_tiles(kChanges);
  static constexpr int kLoader = kGroups * 4 + kScalers;  ///< The warp that asks for bytes.
  static constexpr int kLow = kLoader + 1;  ///< The first warp of the lows.
  /// The warp that fills the table of changes.
  static constexpr int kClerk = kLow + (kIsChanged ? kLowWarps : 0);
  static constexpr int kWarps = kClerk + (kHasRuns ? 1 : 0);
  static constexpr int kThreads = kWarps * 32;
  static constexpr int kWriters = kLoader * 32;  ///< Threads that write sums without changes out.
  /// Threads that read the ring meet before sums are written in its place.
  static constexpr int kMeeting = kGroups * 128 + (kIsChanged ? kLowWarps * 32 : 0);
  static constexpr int kColumns = kGroups * kGroupColumns;
  static constexpr int kPitch = kColumns + 4;  ///< Floats of a row of the sums on the way out.
  static constexpr u32 kRowBytes = kRows * kDepth * 2;
  static constexpr u32 kStageBytes = kGroups * kMatrixBytes + kRowBytes;
  /// Blocks of A under way.
  static constexpr int kFactorStages = kTiles == kLayers ? 3 : 4;
  static constexpr u32 kFactorBytes = kTiles * kFactorStages * kLowBytes;
  static constexpr u32 kTableBytes = kHasRuns ? sizeof(ChangeTable) : 0;
  static constexpr int kResident = kGroups > 2 ? 1 : 2;  ///< CTAs of a multiprocessor.
  static constexpr u32 kRest = 896;              ///< Bytes of barriers and the rows' squares.
  static constexpr int kStages =
      kIsChanged ? ((kResident > 1 ? 112 : 200) * 1024 - kRest - kTableBytes - kFactorBytes) /
                       kStageBytes
                 : 200 * 1024 / kResident / kStageBytes / 2 * 2;
  static constexpr u32 kFactorTiles = kStages * kStageBytes;
  static constexpr u32 kBarriers = kFactorTiles + kFactorBytes;
  static constexpr u32 kSquares = (kBarriers + 3 * kStages * 8 + 15) / 16 * 16;
  static constexpr u32 kFactors = kSquares + 2 * kRows * 4;
  static constexpr u32 kTable = kFactors + kRows * 4;
  static constexpr u32 kBytes = kTable + kTableBytes;
  static_assert(kRows * kPitch * 4 <= kFactorTiles);  // the sums lie in the place of the ring
  static_assert(kRows * kLowColumns * 2 <= kLowBytes);  // and lows in that of tiles of A
  static_assert(kResident * (kBytes + 2048) <= 228 * 1024);
};

struct Arguments {
  CUtensorMap rows_map, maps[kMostFewRowSums + 1];
  few_row::Arguments few;  ///< first_block: tiles; makers: clusters that make lows of runs.
  int map_of[kMostFewRowSums];
  bool is_wide[kMostFewRowSums];  ///< Four elements of y and start are 8 bytes of memory.
  int split;                      ///< CTAs of a cluster, which share the depth of a tile.
};

#if defined(__CUDA_ARCH_FEAT_SM90_ALL)

/// Counts for a barrier without waiting for it.
__device__ __forceinline__ void named_arrive(int id, int threads) {
  asm volatile("bar.arrive %0, %1;" ::"r"(id), "r"(threads) : "memory");
}
/// Loads from the same place of the shared memory of another CTA of the cluster.
__device__ __forceinline__ float2 load2_from(u32 address, u32 rank) {
  float2 v;
  asm volatile(
      "{.reg .b32 t; mapa.shared::cluster.u32 t, %2, %3; "
      "ld.shared::cluster.v2.f32 {%0, %1}, [t];}"
      : "=f"(v.x), "=f"(v.y)
      : "r"(address), "r"(rank)
      : "memory");
  return v;
}

/// A CTA's work: blocks [begin, begin + steps) of the depth.
struct Work {
  const Arguments& p;
  const few_row::Arguments& few;
  const FewRowSum& sum;
  int which, first, begin, steps, rank;

  __device__ __forceinline__ bool is_gated() const { return sum.up != nullptr; }
  __device__ __forceinline__ bool is_normed() const { return few.norm.weight != nullptr; }
  __device__ __forceinline__ const FewRowChange& change(int layer) const {
    return layer == 0 ? sum.change : sum.up_change;
  }
  /// Elements of block i that the depth has.
  __device__ __forceinline__ int valid(int i) const {
    return min(kDepth, few.depth - (begin + i) * kDepth);
  }
};

/// The ring and its barriers, by block of the CTA's work.
template <int kRows, int kGroups, Changes kChanges>
struct Ring {
  using L = Layout<kRows, kGroups, kChanges>;
  u32 base;

  static __device__ __forceinline__ int stage(int i) { return i % L::kStages; }
  static __device__ __forceinline__ int phase(int i) { return i / L::kStages & 1; }
  __device__ __forceinline__ u32 matrix(int i) const { return base + stage(i) * L::kStageBytes; }
  __device__ __forceinline__ u32 rows(int i) const { return matrix(i) + kGroups * kMatrixBytes; }
  /// A tile of A, swizzled as the others.
  __device__ __forceinline__ u32 factor(int i, int tile) const {
    return base + L::kFactorTiles + (i % L::kFactorStages * L::kTiles + tile) * kLowBytes;
  }
  __device__ __forceinline__ u32 full(int i) const { return base + L::kBarriers + stage(i) * 8; }
  __device__ __forceinline__ u32 scaled(int i) const { return full(i) + L::kStages * 8; }
  __device__ __forceinline__ u32 empty(int i) const { return full(i) + 2 * L::kStages * 8; }
  __device__ __forceinline__ void init() const {
    for (int s = 0; s < L::kStages; ++s) {
      mbar_init(full(s), 1);
      mbar_init(scaled(s), 2);
      mbar_init(empty(s), kGroups * 4 + (L::kIsChanged ? kLowWarps : 0));
    }
    fence_cluster_barriers();
  }
};

#endif

}  // namespace heddle::ops::cuda::batch_row
