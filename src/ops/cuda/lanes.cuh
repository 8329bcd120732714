// Rows short enough for part of a warp: kLanes neighbouring lanes hold one row, each kVectors
// accesses of N elements, access v of a lane at element (v * kLanes + lane) * N.
#pragma once

#include <stdexcept>
#include <string>
#include <type_traits>

#include "ops/cuda/reduce.cuh"
#include "ops/cuda/vector.cuh"

namespace heddle::ops::cuda {

constexpr int kLaneRowThreads = 256;

/// Longest row that dispatch_lanes takes in accesses of N elements.
constexpr int64_t longest_lane_row(int n) { return n == 1 ? 512 : 64 * n; }

/// Calls f(lanes, vectors) as integral constants for rows of `width` elements in accesses of N.
template <int N, class F>
void dispatch_lanes(const char* op, int64_t width, const F& f) {
  const int64_t vectors = width / N;
  if (width > longest_lane_row(N)) {
    throw std::invalid_argument(std::string(op) + ": rows of " + std::to_string(width) +
                                " elements, the CUDA kernel takes " +
                                std::to_string(longest_lane_row(N)) +
                                (N == 1 ? " where they are not aligned to 16 bytes" : ""));
  }
  if constexpr (N == 1) {
    if (vectors <= 128) {
      f(std::integral_constant<int, 32>(), std::integral_constant<int, 4>());
    } else {
      f(std::integral_constant<int, 32>(), std::integral_constant<int, 16>());
    }
  } else if (vectors <= 8) {
    f(std::integral_constant<int, 8>(), std::integral_constant<int, 1>());
  } else if (vectors <= 16) {
    f(std::integral_constant<int, 16>(), std::integral_constant<int, 1>());
  } else if (vectors <= 32) {
    f(std::integral_constant<int, 32>(), std::integral_constant<int, 1>());
  } else {
    f(std::integral_constant<int, 32>(), std::integral_constant<int, 2>());
  }
}

/// Adds up the columns that the CTA's groups of lanes hold, in the groups' order, and writes them
/// to partial[width].
template <int N, int kLanes, int kVectors>
__device__ __forceinline__ void store_column_sums(const float (&sums)[kVectors][N], uint32_t width,
                                                  float* partial) {
  constexpr int kGroups = kLaneRowThreads / kLanes, kColumns = kLanes * kVectors * N;
  __shared__ float lines[kGroups][kColumns];
  const int group = threadIdx.x / kLanes, lane = threadIdx.x % kLanes;
#pragma unroll
  for (int v = 0; v < kVectors; ++v) {
#pragma unroll
    for (int i = 0; i < N; ++i) lines[group][(v * kLanes + lane) * N + i] = sums[v][i];
  }
  __syncthreads();
  for (uint32_t column = threadIdx.x; column < width; column += kLaneRowThreads) {
    float total = 0;
#pragma unroll
    for (int g = 0; g < kGroups; ++g) total += lines[g][column];
    partial[column] = total;
  }
}

/// CTAs of a persistent launch over rows of which one CTA takes kLaneRowThreads / lanes at a time.
inline int64_t lane_row_blocks(int64_t rows, int64_t most) {
  return rows < most ? (rows > 0 ? rows : 1) : most;
}

}  // namespace heddle::ops::cuda
