// Tiles of the grouped product: their tokens, their expert, and the cluster that takes each.
//
// An expert's rows are cut into tiles of nearly equal size. Tiles of all features of the same rows
// come one after the other, so that clusters that run at the same time read the same tokens.
// Clusters take tiles by turns. Where experts are taken in the order of their tiles' size, largest
// first, every other round is in the opposite order: no cluster has the larger ones of all rounds.
#pragma once

#include "ops/cuda/ptx.cuh"

namespace heddle::ops::cuda {

/// Place of a tile: which features of which expert, and which rows.
struct Place {
  int expert, feature, row, rows;
};

/// Writes the experts in falling order of their sizes, of equal ones the first one first. All
/// threads of the CTA, which synchronise before and after.
template <class Index>
__device__ __forceinline__ void order_by_size(const int* sizes, int experts, Index* order) {
  for (int e = static_cast<int>(threadIdx.x); e < experts; e += static_cast<int>(blockDim.x)) {
    const int own = sizes[e];
    int before = 0;
#pragma unroll 8
    for (int i = 0; i < experts; ++i) before += sizes[i] > own || (sizes[i] == own && i < e);
    order[before] = static_cast<Index>(e);
  }
}

/// Tokens in steps of kStep, at most kTokens a tile.
template <int kStep, int kTokens, bool kLargestFirst>
struct TokenTiles {
  static constexpr int kExpertBits = 10;
  static constexpr int kMostTiles = 1 << (31 - kExpertBits);  ///< All experts together.

  /// [experts + 1]: the tiles before an expert, in the order of the tiles, above kExpertBits bits
  /// that tell which expert it is.
  const int* table;
  const int32_t* ends;  ///< [experts], of the rows of each.
  int experts;

  __device__ __forceinline__ static int tiles_of(int rows) {
    return (rows + kTokens - 1) / kTokens;
  }
  __device__ __forceinline__ static int steps_of(int rows) { return (rows + kStep - 1) / kStep; }
  __device__ __forceinline__ static int begin_of(const int32_t* ends, int expert) {
    return expert == 0 ? 0 : ends[expert - 1];
  }

  /// Fills table [experts + 1]; scratch: [2 * experts]. All threads of the CTA.
  __device__ static void fill(const int32_t* ends, int experts, int* scratch, int* table) {
    int *const sizes = scratch, *const sorted = scratch + experts;
    for (int e = static_cast<int>(threadIdx.x); e < experts; e += static_cast<int>(blockDim.x)) {
      const int rows = ends[e] - begin_of(ends, e), tiles = tiles_of(rows);
      sizes[e] = tiles == 0 ? 0 : (steps_of(rows) + tiles - 1) / tiles;
    }
    __syncthreads();
    if constexpr (kLargestFirst) {
      order_by_size(sizes, experts, sorted);
    } else {
      for (int e = static_cast<int>(threadIdx.x); e < experts; e += static_cast<int>(blockDim.x))
        sorted[e] = e;
    }
    __syncthreads();
    if (threadIdx.x >= 32) return;
    const int lane = static_cast<int>(threadIdx.x);
    int before = 0;
    for (int i = lane; i - lane < experts; i += 32) {
      const int e = i < experts ? sorted[i] : 0;
      const int own = i < experts ? tiles_of(ends[e] - begin_of(ends, e)) : 0;
      int sum = own;
#pragma unroll
      for (int d = 1; d < 32; d *= 2) {
        const int other = __shfl_up_sync(0xffffffffu, sum, d);
        if (lane >= d) sum += other;
      }
      if (i < experts) table[i] = (before + sum - own) << kExpertBits | e;
      before += __shfl_sync(0xffffffffu, sum, 31);
    }
    if (lane == 0) table[experts] = before << kExpertBits;
  }

  __device__ __forceinline__ int count() const { return table[experts] >> kExpertBits; }

  /// Item of a round that one of `clusters` takes.
  __device__ __forceinline__ static int turn(int round, int cluster, int clusters) {
    return kLargestFirst && round % 2 == 1 ? clusters - 1 - cluster : cluster;
  }

  /// The rows of a tile; its features are left alone.
  __device__ __forceinline__ void find(int tile, Place& place) const {
    int low = 0, high = experts - 1;
    while (low < high) {
      const int middle = (low + high + 1) / 2;
      if (table[middle] >> kExpertBits <= tile) {
        low = middle;
      } else {
        high = middle - 1;
      }
    }
    const int expert = table[low] & ((1 << kExpertBits) - 1),
              index = tile - (table[low] >> kExpertBits);
    const int begin = begin_of(ends, expert), rows = ends[expert] - begin;
    // Equal parts in units of kStep.
    const int steps = steps_of(rows), tiles = tiles_of(rows), each = steps / tiles,
              more = steps % tiles;
    const int start = (index * each + min(index, more)) * kStep;
    place.expert = expert;
    place.row = begin + start;
    place.rows = min((each + (index < more)) * kStep, rows - start);
  }
};

}  // namespace heddle::ops::cuda
