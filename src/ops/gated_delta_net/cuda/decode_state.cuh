// One step of the gated delta rule for columns of a state that lies in a CTA's registers. With S
// the state before the token and q, k of unit length,
//   u = beta (v - e^g k^T S),   S' = e^g S + k u,   o = e^g q^T S + (q . k) u,
// so that one pass over the registers gives k^T S and q^T S, a sum over the warps u and o, and a
// second pass the new state. Sums have a fixed order.
#pragma once

#include <cstdint>

#include "ops/cuda/reduce.cuh"

namespace heddle::ops::cuda::gdn_step {

constexpr int kThreads = 256, kWarps = kThreads / 32;  // of a step
constexpr float kNormEps = 1e-6f;

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
template <int K, int kColumns, bool kKeeps = true>
struct StateTile {
  using T = Tile<K, kColumns>;
  float4 rows[kKeeps ? T::kRows : 1];
  float* address;
  int thread;

  __device__ __forceinline__ StateTile(float* state, int column, int thread)
      : address(state + static_cast<int64_t>(thread / T::kLanes) * K + column +
                thread % T::kLanes * 4),
        thread(thread) {
#pragma unroll
    for (int i = 0; i < (kKeeps ? T::kRows : 0); ++i) rows[i] = at(i);
  }
  __device__ __forceinline__ float4& at(int i) const {
    return *reinterpret_cast<float4*>(address + i * T::kGroups * K);
  }
  __device__ __forceinline__ float4 row(int i) const {
    if constexpr (kKeeps) return rows[i];
    return at(i);
  }

  /// One step for the thread's four columns, whose v is given. use(o) is called before the state is
  /// written, with their o, the same in every thread of a column. `sync`: a barrier of the kThreads
  /// threads. The caller puts one before the next step.
  template <class Sync, class Use>
  __device__ __forceinline__ void step(Shared<K, kColumns>& shared, const Factors& f, float decay,
                                       float beta, const float (&v)[4], const Sync& sync,
                                       const Use& use) {
    const int group = thread / T::kLanes, lane = thread % T::kLanes;
    float ks[4] = {}, qs[4] = {};
#pragma unroll
    for (int i = 0; i < T::kRows; ++i) {
      const float k = shared.k[group + i * T::kGroups], q = shared.q[group + i * T::kGroups];
      const float4 r = row(i);
      const float s[4] = {r.x, r.y, r.z, r.w};
#pragma unroll
      for (int c = 0; c < 4; ++c) ks[c] += k * s[c], qs[c] += q * s[c];
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
      u[c] = beta * (v[c] - decay * f.k * ks[c]);
      o[c] = decay * f.q * qs[c] + f.qk * u[c];
    }
    use(make_float4(o[0], o[1], o[2], o[3]));
#pragma unroll
    for (int i = 0; i < T::kRows; ++i) {
      const float k = f.k * shared.k[group + i * T::kGroups];
      const float4 r = row(i);
      at(i) = make_float4(decay * r.x + k * u[0], decay * r.y + k * u[1], decay * r.z + k * u[2],
                          decay * r.w + k * u[3]);
    }
  }
};

}  // namespace heddle::ops::cuda::gdn_step
