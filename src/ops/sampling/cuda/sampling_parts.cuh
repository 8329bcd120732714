// Rows of logits in chunks, what is found of a chunk, and reductions over a CTA (sampling.cu says
// how the launches go).
#pragma once

#include "ops/cuda/vector.cuh"
#include "ops/sampling/cuda/sampling.h"
#include "ops/sampling/mass.h"

namespace heddle::ops::cuda::sampler {

constexpr int kChunk = 4096, kChunkThreads = 256, kDrawThreads = 1024, kEach = 8;
constexpr int kMostChunks = (1 << 19) / kChunk;
constexpr int kDigitBits = 11, kDigits = 1 << kDigitBits;  // sign, exponent, 2 bits of the rest
/// Tokens collected of a chunk and of a row, at most; with more the whole row is read.
constexpr int kChunkCandidates = 256, kCandidates = 4096;
using Mass = unsigned long long;

struct Chunk {
  double sum;  // of exp(logit - highest)
  float highest;
  int id;  // the lowest with that logit
};

struct Candidate {
  float logit;
  int id;
};

struct Arguments {
  SampleTokensArguments in;
  int chunks;
  Chunk* found;            // [batch,chunks]
  Mass* masses;            // [batch,chunks]
  Mass* digit_masses;      // [batch,kDigits], of rows with cuts, as what follows
  Candidate* candidates;   // [batch,chunks,kChunkCandidates], in the order of ids
  unsigned* digit_counts;  // [batch,kDigits]
  int* candidate_counts;   // [batch,chunks], what there would be
};

template <class T>
struct Row {
  const T* logits;

  __device__ __forceinline__ float operator[](int id) const {
    float value[1];
    read(logits + id, value);
    return value[0];
  }
};

template <class T>
__device__ __forceinline__ Row<T> row_of(const Arguments& a, int row) {
  return {static_cast<const T*>(a.in.logits.data) + row * a.in.logits.outer_stride};
}

__device__ __forceinline__ bool comes_first(float x, int id, float other, int other_id) {
  return x > other || (x == other && id < other_id);
}

/// The most likely token of the CTA's threads, in every thread.
__device__ __forceinline__ void most_likely(float& highest, int& id) {
  __shared__ float values[32];
  __shared__ int ids[32];
  const auto over_warp = [&] {
#pragma unroll
    for (int distance = 16; distance > 0; distance /= 2) {
      const float x = __shfl_xor_sync(0xffffffffu, highest, distance);
      const int other = __shfl_xor_sync(0xffffffffu, id, distance);
      if (comes_first(x, other, highest, id)) highest = x, id = other;
    }
  };
  over_warp();
  const int warp = threadIdx.x / 32, lane = threadIdx.x % 32;
  if (lane == 0) values[warp] = highest, ids[warp] = id;
  __syncthreads();
  const int warps = blockDim.x / 32;
  highest = values[lane % warps], id = ids[lane % warps];
  over_warp();
}

template <class N>
__device__ __forceinline__ N warp_sum(N value) {
#pragma unroll
  for (int distance = 16; distance > 0; distance /= 2)
    value += __shfl_xor_sync(0xffffffffu, value, distance);
  return value;
}

/// The sum over the CTA, in every thread, in a fixed order.
template <class N>
__device__ __forceinline__ N cta_sum(N value) {
  __shared__ N sums[32];
  value = warp_sum(value);
  __syncthreads();
  if (threadIdx.x % 32 == 0) sums[threadIdx.x / 32] = value;
  __syncthreads();
  const unsigned lane = threadIdx.x % 32;
  return warp_sum(lane < blockDim.x / 32 ? sums[lane] : N{0});
}

__device__ __forceinline__ bool has_cuts(const SampleTokensArguments& in, int row) {
  return in.top_p[row] < 1 || in.min_p[row] > 0 || in.top_k[row] > 0;
}

}  // namespace heddle::ops::cuda::sampler
