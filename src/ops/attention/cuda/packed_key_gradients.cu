// dk and dv of 64 keys: the queries of all heads that read them pass by, and the sums stay in
// registers. Of the two groups that multiply, one makes scores and probabilities, the other the
// gradients of both, each 128 columns of dk and dv; a group multiplies for the next tile of queries
// while the other still works on this one.
#include "ops/attention/cuda/packed_tiles.cuh"

namespace heddle::ops::cuda::packed {
namespace {

// Shared memory, from a multiple of 1024 on. What queries bring has two places each.
constexpr u32 kKeys = 0, kValues = kTile, kQueries = 2 * kTile, kGradO = 4 * kTile,
              kProbabilities = 6 * kTile, kGradScores = 6 * kTile + 2 * kSquare,
              kBarriers = 6 * kTile + 4 * kSquare, kSharedBytes = kBarriers + 128 + 1024;
constexpr u32 kFullKeys = kBarriers, kFullQueries = kBarriers + 8, kFullGradO = kBarriers + 24,
              kEmptyQueries = kBarriers + 40, kEmptyGradO = kBarriers + 56;

enum NamedBarrier { kHaveProbabilities = 1, kHaveGradScores, kOwn, kOwnOther, kAllProducts };

struct Work {
  Sequence sequence;
  int n, head, heads;  ///< Key tile, its head, the heads of queries that read it.

  __device__ __forceinline__ int steps() const { return (sequence.tiles() - n) * heads; }
};

__device__ __forceinline__ void load(const Args& a, const Work& w, u32 smem) {
  const int row = w.sequence.row(w.n), tiles = w.sequence.tiles();
  mbar_expect(smem + kFullKeys, 2 * kTile);
  load_tile(smem + kKeys, a.k, row, w.head, smem + kFullKeys);
  load_tile(smem + kValues, a.v, row, w.head, smem + kFullKeys);
  int i = 0;
  for (int head = w.head * w.heads; head < (w.head + 1) * w.heads; ++head) {
    for (int m = w.n; m < tiles; ++m, ++i) {
      const u32 place = i & 1;
      const int q_row = w.sequence.row(m), phase = (i >> 1 & 1) ^ 1;
      const u32 q_bar = smem + kFullQueries + 8 * place, o_bar = smem + kFullGradO + 8 * place;
      mbar_wait(smem + kEmptyGradO + 8 * place, phase);
      mbar_expect(o_bar, kTile);
      load_tile(smem + kGradO + place * kTile, a.d_o, q_row, head, o_bar);
      mbar_wait(smem + kEmptyQueries + 8 * place, phase);
      mbar_expect(q_bar, kTile);
      load_tile(smem + kQueries + place * kTile, a.q, q_row, head, q_bar);
    }
  }
}

/// From gradients of the probabilities and the probabilities in shared memory to there.
__device__ __forceinline__ void grad_scores(const float (&dp)[8][4], const float (&delta)[2],
                                            u32 from, u32 to, const Place& at) {
  const int m = at.lane >> 3, r = at.lane & 7;
#pragma unroll
  for (int j = 0; j < 8; j += 2) {
    u32 p[4], f[4];
    ldmatrix4(p, tile_address(from, kRows, at.warp * 16 + (m & 1) * 8 + r, j * 8 + (m >> 1) * 8));
#pragma unroll
    for (int e = 0; e < 4; ++e) {
      const float* d = &dp[j + e / 2][e % 2 * 2];
      f[e] = pack_bf16(grad_score(bf16_lo(p[e]), d[0], delta[e % 2]),
                       grad_score(bf16_hi(p[e]), d[1], delta[e % 2]));
    }
    store_fragment(to, kRows, at.warp * 16, j * 8, at.lane, f);
  }
}

template <bool kScores>
__device__ __forceinline__ void multiply(const Args& a, const Work& w, u32 smem) {
  const Place at;
  constexpr int kOwnBarrier = kScores ? kOwn : kOwnOther;
  constexpr u32 kHalf = kScores ? 0 : kHalfTile;
  const u32 full_x = smem + (kScores ? kFullQueries : kFullGradO),
            full_y = smem + (kScores ? kFullGradO : kFullQueries),
            x = smem + (kScores ? kQueries : kGradO), y = smem + (kScores ? kKeys : kValues);
  const float* stats = kScores ? a.lse : a.delta;
  constexpr float kFactor = kScores ? kLog2e : 1;
  float dv[16][4], dk[16][4], s[8][4], now[2], next[2];
  zero(dv);
  zero(dk);
  int head = w.head * w.heads, m = w.n;
  const int steps = w.steps(), tiles = w.sequence.tiles();
  load_stats(next, stats, kFactor, a, w.sequence, m, head, at);
  mbar_wait(smem + kFullKeys, 0);
  mbar_wait(full_x, 0);
  Mma::fence();
  Mma::ss<16, false, false>(s, x, y, false);
  Mma::commit();
  Mma::wait<0>();
  pin(s);
#pragma unroll 1
  for (int i = 0; i < steps; ++i) {
    const u32 place = i & 1, other = place ^ 1, phase = i >> 1 & 1;
    const u32 q = smem + kQueries + place * kTile, d_o = smem + kGradO + place * kTile,
              p = smem + kProbabilities + place * kSquare,
              ds = smem + kGradScores + place * kSquare;
    const int valid = w.sequence.valid(m);
    const bool diagonal = m == w.n, more = i + 1 < steps;
    now[0] = next[0], now[1] = next[1];
    if (++m == tiles) m = w.n, ++head;
    if (more) load_stats(next, stats, kFactor, a, w.sequence, m, head, at);

    if constexpr (kScores) {
      probabilities(s, now, a.scale * kLog2e, diagonal, valid, at);
      put_fragments(p, s, 1.f, at);
      mbar_wait(full_y + 8 * place, phase);
      if (valid < kRows) {
        clear_rows(q, valid, at);
        clear_rows(d_o, valid, at);
      }
      fence_async_proxy();
      named_sync(kOwnBarrier, kGroup);
      named_arrive(kHaveProbabilities, kConsumers);
    } else {
      named_sync(kHaveProbabilities, kConsumers);
      grad_scores(s, now, p, ds, at);
      mbar_wait(full_y + 8 * place, phase);
      fence_async_proxy();
      named_sync(kOwnBarrier, kGroup);
      named_arrive(kHaveGradScores, kConsumers);
    }
    Mma::wait<0>();  // dk of the last step
    if (i > 0) release(smem + kEmptyQueries + 8 * other, at);
    Mma::fence();
    Mma::ss<4, true, true>(dv, p, d_o + kHalf, true);
    Mma::commit();
    if (more) {
      mbar_wait(full_x + 8 * other, (i + 1) >> 1 & 1);
      Mma::ss<16, false, false>(s, x + other * kTile, y, false);
      Mma::commit();
    }
    if constexpr (kScores) named_sync(kHaveGradScores, kConsumers);
    Mma::ss<4, true, true>(dk, ds, q + kHalf, true);
    Mma::commit();
    Mma::wait<1>();
    pin(s);
    release(smem + kEmptyGradO + 8 * place, at);
  }
  Mma::wait<0>();
  pin(dv);
  pin(dk);
  named_sync(kAllProducts, kConsumers);
  const int64_t stride = int64_t{a.k_heads} * kDim;
  const int64_t to = w.sequence.row(w.n) * stride + w.head * kDim + (kScores ? 0 : kDim / 2);
  const int valid = w.sequence.valid(w.n);
  put_fragments(smem + kGradO + kHalf, dv, 1.f, at);
  put_fragments(smem + kQueries + kHalf, dk, a.scale, at);
  named_sync(kOwnBarrier, kGroup);
  store_tile<kDim / 2>(a.dv + to, smem + kGradO + kHalf, stride, valid, at.tid);
  store_tile<kDim / 2>(a.dk + to, smem + kQueries + kHalf, stride, valid, at.tid);
}

__global__ void __launch_bounds__(kThreads, 1) key_gradients(const __grid_constant__ Args a) {
  extern __shared__ uint8_t raw[];
  const int2 entry = a.work[blockIdx.x / a.k_heads];
  if (entry.x < 0) return;
  const u32 smem = (smem_u32(raw) + 1023) & ~1023u;
  if (threadIdx.x == 0) {
    for (u32 full = kFullKeys; full < kEmptyQueries; full += 8) mbar_init(smem + full, 1);
    for (u32 place = 0; place < 2; ++place) {
      mbar_init(smem + kEmptyQueries + 8 * place, kConsumers / 32);
      mbar_init(smem + kEmptyGradO + 8 * place, kConsumers / 32);
    }
    fence_async_proxy();
  }
  __syncthreads();
  const Work w = {Sequence(a, entry.x), entry.y, static_cast<int>(blockIdx.x % a.k_heads),
                  a.q_heads / a.k_heads};
  const int group = __shfl_sync(0xffffffffu, threadIdx.x / kGroup, 0);
  if (group == 0) {
    set_max_registers_down<kLoaderRegisters>();
    if (threadIdx.x == 0) load(a, w, smem);
  } else if (group == 1) {
    set_max_registers_up<kConsumerRegisters>();
    multiply<true>(a, w, smem);
  } else {
    set_max_registers_up<kConsumerRegisters>();
    multiply<false>(a, w, smem);
  }
}

}  // namespace

void launch_key_gradients(const Args& args, unsigned entries, cudaStream_t stream) {
  cudaFuncSetAttribute(key_gradients, cudaFuncAttributeMaxDynamicSharedMemorySize, kSharedBytes);
  key_gradients<<<entries * args.k_heads, kThreads, kSharedBytes, stream>>>(args);
}

}  // namespace heddle::ops::cuda::packed
