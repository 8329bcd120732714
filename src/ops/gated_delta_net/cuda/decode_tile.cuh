// A tile of one recurrent state and its step, for the kernels of decode.cu.
#pragma once

#include "ops/cuda/reduce.cuh"
#include "ops/cuda/vector.cuh"

namespace heddle::ops::cuda::gdn_decode {

inline constexpr int kThreads = 256, kWarps = kThreads / 32;
/// Columns of a CTA that computes the rule alone: few, so that one sequence occupies many
/// multiprocessors, and always as many, so that a sequence's bits do not depend on the batch.
inline constexpr int kTile = 32;
inline constexpr float kNormEps = 1e-6f;

template <int K, int kColumns>
struct Tile {
  static constexpr int kLanes = kColumns / 4;        // threads that share a row
  static constexpr int kGroups = kThreads / kLanes;  // rows worked on at once
  static constexpr int kRows = K / kGroups;          // rows of a thread
  static constexpr int kGroupsOfWarp = 32 / kLanes;
  static_assert(kLanes <= 32 && kRows >= 1);
};

template <int K, int kColumns>
struct Shared {
  float q[K], k[K];
  float sums[2][kWarps][kColumns];  // k^T S and q^T S of each warp's rows
};

struct Factors {
  float q, k;  // what makes q and k of unit length, with the scale
  float qk;    // q . k of the rows of unit length, with the scale
};

/// Every warp for itself, over the rows in shared memory.
template <int K>
__device__ __forceinline__ Factors factors(const float* q, const float* k, bool normalize,
                                           float scale) {
  float qq = 0, kk = 0, qk = 0;
#pragma unroll
  for (int i = 0; i < K / 32; ++i) {
    const float a = q[threadIdx.x % 32 + i * 32], b = k[threadIdx.x % 32 + i * 32];
    qq += a * a, kk += b * b, qk += a * b;
  }
  qq = lane_sum(qq), kk = lane_sum(kk), qk = lane_sum(qk);
  Factors f;
  f.q = scale * (normalize ? rsqrtf(qq + kNormEps) : 1.f);
  f.k = normalize ? rsqrtf(kk + kNormEps) : 1.f;
  f.qk = f.q * f.k * qk;
  return f;
}

/// The state's tile, loaded before anything else is waited for; not kKeeps: it lies in shared
/// memory and is read from there twice.
template <class State, int K, int kColumns, bool kKeeps = true>
struct StateTile {
  using T = Tile<K, kColumns>;
  Packed<State, 4> rows[kKeeps ? T::kRows : 1];
  State* address;
  int thread;

  __device__ __forceinline__ StateTile(State* state, int column, int thread)
      : address(state + static_cast<int64_t>(thread / T::kLanes) * K + column +
                thread % T::kLanes * 4),
        thread(thread) {
#pragma unroll
    for (int i = 0; i < (kKeeps ? T::kRows : 0); ++i) rows[i] = load<4>(at(i));
  }
  __device__ __forceinline__ State* at(int i) const { return address + i * T::kGroups * K; }
  __device__ __forceinline__ void row(int i, float (&s)[4]) const {
    if constexpr (kKeeps) {
      unpack(rows[i], s);
    } else {
      read(at(i), s);
    }
  }

  /// One step, whose bits do not depend on the type that states are stored as: products and sums
  /// that a compiler could join in several ways are joined here. For the thread's four columns,
  /// whose v is given; returns o of them, the same in every thread of a column. `sync`: a barrier
  /// of the kThreads threads. The caller puts one before the next step.
  template <class Sync>
  __device__ __forceinline__ float4 step(Shared<K, kColumns>& shared, const Factors& f, float decay,
                                         float beta, const float (&v)[4], const Sync& sync) {
    const int group = thread / T::kLanes, lane = thread % T::kLanes;
    float ks[4] = {}, qs[4] = {};
#pragma unroll
    for (int i = 0; i < T::kRows; ++i) {
      const float k = shared.k[group + i * T::kGroups], q = shared.q[group + i * T::kGroups];
      float s[4];
      row(i, s);
#pragma unroll
      for (int c = 0; c < 4; ++c) ks[c] = fmaf(k, s[c], ks[c]), qs[c] = fmaf(q, s[c], qs[c]);
    }
    if constexpr (T::kGroupsOfWarp > 1) {
#pragma unroll
      for (int distance = T::kLanes; distance < 32; distance *= 2) {
#pragma unroll
        for (int c = 0; c < 4; ++c) {
          ks[c] += __shfl_xor_sync(0xffffffffu, ks[c], distance);
          qs[c] += __shfl_xor_sync(0xffffffffu, qs[c], distance);
        }
      }
    }
    const int warp = thread / 32;
    if (thread % 32 < T::kLanes) {
      *reinterpret_cast<float4*>(&shared.sums[0][warp][lane * 4]) =
          make_float4(ks[0], ks[1], ks[2], ks[3]);
      *reinterpret_cast<float4*>(&shared.sums[1][warp][lane * 4]) =
          make_float4(qs[0], qs[1], qs[2], qs[3]);
    }
    sync();
#pragma unroll
    for (int c = 0; c < 4; ++c) ks[c] = qs[c] = 0;
#pragma unroll
    for (int w = 0; w < kWarps; ++w) {
      const float4 a = *reinterpret_cast<const float4*>(&shared.sums[0][w][lane * 4]);
      const float4 b = *reinterpret_cast<const float4*>(&shared.sums[1][w][lane * 4]);
      ks[0] += a.x, ks[1] += a.y, ks[2] += a.z, ks[3] += a.w;
      qs[0] += b.x, qs[1] += b.y, qs[2] += b.z, qs[3] += b.w;
    }
    float u[4], o[4];
#pragma unroll
    for (int c = 0; c < 4; ++c) {
      u[c] = beta * fmaf(-decay * f.k, ks[c], v[c]);
      o[c] = fmaf(decay * f.q, qs[c], f.qk * u[c]);
    }
#pragma unroll
    for (int i = 0; i < T::kRows; ++i) {
      const float k = f.k * shared.k[group + i * T::kGroups];
      float s[4];
      row(i, s);
#pragma unroll
      for (int c = 0; c < 4; ++c) s[c] = fmaf(decay, s[c], k * u[c]);
      write(at(i), s);
    }
    return make_float4(o[0], o[1], o[2], o[3]);
  }
};

}  // namespace heddle::ops::cuda::gdn_decode
