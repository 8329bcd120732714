// dq of 128 queries of a head: keys and values pass by, and each of the two groups that multiply
// makes scores, probabilities and their gradients of its own 64 queries, all in registers. The
// groups are not tied to each other: one multiplies while the other computes.
#include <type_traits>

#include "ops/attention/cuda/packed_tiles.cuh"

namespace heddle::ops::cuda::packed {
namespace {

// Shared memory, from a multiple of 1024 on: two tiles of queries, two places for keys.
constexpr u32 kQueries = 0, kGradO = 2 * kTile, kKeys = 4 * kTile, kValues = 6 * kTile,
              kBarriers = 7 * kTile, kSharedBytes = kBarriers + 128 + 1024;
constexpr u32 kFullQueries = kBarriers, kFullKeys = kBarriers + 8, kFullValues = kBarriers + 24,
              kEmptyKeys = kBarriers + 32, kEmptyValues = kBarriers + 48;

struct Work {
  Sequence sequence;
  int pair, head;  ///< Query tiles 2 pair and 2 pair + 1.

  /// Key tiles that the first `count` of the two see.
  __device__ __forceinline__ int keys(int count) const {
    return min(2 * pair + count, sequence.tiles());
  }
};

__device__ __forceinline__ void load(const Args& a, const Work& w, u32 smem) {
  const int k_head = w.head / (a.q_heads / a.k_heads), keys = w.keys(2);
  mbar_expect(smem + kFullQueries, 4 * kTile);
  for (int i = 0; i < 2; ++i) {
    const int row = w.sequence.row(2 * w.pair + i);
    load_tile(smem + kQueries + i * kTile, a.q, row, w.head, smem + kFullQueries);
    load_tile(smem + kGradO + i * kTile, a.d_o, row, w.head, smem + kFullQueries);
  }
  for (int n = 0; n < keys; ++n) {
    const u32 place = n & 1, k_bar = smem + kFullKeys + 8 * place, v_bar = smem + kFullValues;
    const int row = w.sequence.row(n);
    mbar_wait(smem + kEmptyKeys + 8 * place, (n >> 1 & 1) ^ 1);
    mbar_expect(k_bar, kTile);
    load_tile(smem + kKeys + place * kTile, a.k, row, k_head, k_bar);
    mbar_wait(smem + kEmptyValues, (n & 1) ^ 1);
    mbar_expect(v_bar, kTile);
    load_tile(smem + kValues, a.v, row, k_head, v_bar);
  }
}

/// Key tiles that only the other group reads.
__device__ __forceinline__ void pass_by(u32 smem, int from, int to, const Place& at) {
  for (int n = from; n < to; ++n) {
    mbar_wait(smem + kFullKeys + 8 * (n & 1), n >> 1 & 1);
    release(smem + kEmptyKeys + 8 * (n & 1), at);
    mbar_wait(smem + kFullValues, n & 1);
    release(smem + kEmptyValues, at);
  }
}

__device__ __forceinline__ void multiply(const Args& a, const Work& w, u32 smem, int group) {
  const Place at;
  const int m = 2 * w.pair + group, all = w.keys(2), barrier = 1 + group;
  const int own = m < w.sequence.tiles() ? m + 1 : 0;
  const u32 q = smem + kQueries + group * kTile, d_o = smem + kGradO + group * kTile;
  float dq[2][16][4], s[8][4], dp[8][4], lse[2], delta[2];
  if (own == 0) {
    pass_by(smem, 0, all, at);
    return;
  }
  zero(dq[0]);
  zero(dq[1]);
  zero(dp);
  load_stats(lse, a.lse, kLog2e, a, w.sequence, m, w.head, at);
  load_stats(delta, a.delta, 1.f, a, w.sequence, m, w.head, at);
  mbar_wait(smem + kFullQueries, 0);
  mbar_wait(smem + kFullKeys, 0);
  pin(dq[0]);  // zeros, before a product is under way
  pin(dq[1]);
  pin(dp);
  Mma::fence();
  Mma::ss<16, false, false>(s, q, smem + kKeys, false);
  Mma::commit();
  Mma::wait<0>();
  pin(s);
  const auto step = [&](int n, auto is_last) {  // the last key tile is the one on the diagonal
    constexpr bool kLast = decltype(is_last)::value;
    const u32 place = n & 1, keys = smem + kKeys + place * kTile;
    mbar_wait(smem + kFullValues, n & 1);
    Mma::fence();
    Mma::ss<16, false, false>(dp, d_o, smem + kValues, false);
    Mma::commit();
    probabilities(s, lse, a.scale * kLog2e, kLast, kRows, at);
    if (kLast && w.sequence.valid(m) < kRows) {
      clear_rows(keys, w.sequence.valid(m), at);
      fence_async_proxy();
      named_sync(barrier, kGroup);
    }
    Mma::wait<0>();
    pin(dp);
    release(smem + kEmptyValues, at);
    u32 ds[4][4];
#pragma unroll
    for (int j = 0; j < 8; ++j) {
#pragma unroll
      for (int e = 0; e < 4; ++e) s[j][e] = grad_score(s[j][e], dp[j][e], delta[e / 2]);
    }
#pragma unroll
    for (int j = 0; j < 4; ++j) fragment(ds[j], s, 2 * j, 1.f);
    pin(s);
    pin(ds);
    Mma::fence();
    Mma::rs<true>(dq[0], ds, keys, true);
    Mma::rs<true>(dq[1], ds, keys + kHalfTile, true);
    Mma::commit();
    if constexpr (!kLast) {
      mbar_wait(smem + kFullKeys + 8 * (place ^ 1), (n + 1) >> 1 & 1);
      Mma::fence();
      Mma::ss<16, false, false>(s, q, smem + kKeys + (place ^ 1) * kTile, false);
      Mma::commit();
    }
    Mma::wait<0>();
    pin(s);
    pin(ds);
    release(smem + kEmptyKeys + 8 * place, at);
  };
#pragma unroll 1
  for (int n = 0; n + 1 < own; ++n) step(n, std::false_type());
  step(own - 1, std::true_type());
  pass_by(smem, own, all, at);
  pin(dq[0]);
  pin(dq[1]);
  put_fragments(q, dq[0], a.scale, at);
  put_fragments(q + kHalfTile, dq[1], a.scale, at);
  named_sync(barrier, kGroup);
  const int64_t stride = int64_t{a.q_heads} * kDim;
  store_tile<kDim>(a.dq + w.sequence.row(m) * stride + w.head * kDim, q, stride,
                   w.sequence.valid(m), at.tid);
}

__global__ void __launch_bounds__(kThreads, 1) query_gradients(const __grid_constant__ Args a) {
  extern __shared__ uint8_t raw[];
  const int2 entry = a.work[blockIdx.x / a.q_heads];
  if (entry.x < 0) return;
  const u32 smem = (smem_u32(raw) + 1023) & ~1023u;
  if (threadIdx.x == 0) {
    for (u32 full = kFullQueries; full < kEmptyKeys; full += 8) mbar_init(smem + full, 1);
    for (u32 empty = kEmptyKeys; empty <= kEmptyValues; empty += 8)
      mbar_init(smem + empty, kConsumers / 32);
    fence_async_proxy();
  }
  __syncthreads();
  const Sequence sequence(a, entry.x);
  // The list counts up, and the last queries have most work.
  const Work w = {sequence, (sequence.tiles() + 1) / 2 - 1 - entry.y,
                  static_cast<int>(blockIdx.x % a.q_heads)};
  const int group = __shfl_sync(0xffffffffu, threadIdx.x / kGroup, 0);
  if (group == 0) {
    set_max_registers_down<kLoaderRegisters>();
    if (threadIdx.x == 0) load(a, w, smem);
  } else {
    set_max_registers_up<kConsumerRegisters>();
    multiply(a, w, smem, group - 1);
  }
}

}  // namespace

void launch_query_gradients(const Args& args, unsigned entries, cudaStream_t stream) {
  cudaFuncSetAttribute(query_gradients, cudaFuncAttributeMaxDynamicSharedMemorySize, kSharedBytes);
  query_gradients<<<entries * args.q_heads, kThreads, kSharedBytes, stream>>>(args);
}

}  // namespace heddle::ops::cuda::packed
