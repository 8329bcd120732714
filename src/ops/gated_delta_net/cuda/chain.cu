// Second pass of the backward, in reverse: the gradient of the state after every chunk, and dv.
#include "serial.cuh"

namespace heddle::ops::cuda::gdn {
namespace {

template <class M, int D, int NS>
struct ChainSmem {
  static constexpr int kStages = M::kHopper ? 3 : 2;
  static constexpr u32 kWide = 64 * D * 2;
  static constexpr u32 kStage = 2 * kWide + (NS + 1) * 8192;  // K, Q, dO (later dv), T
  static constexpr u32 kScores = kStages * kStage;
  static constexpr u32 kOut = kScores + 2 * 8192;
  static constexpr u32 kScales = kOut + NS * kWide;
  static constexpr u32 kBarriers = kScales + kStages * sizeof(Scales);
  static constexpr u32 kBytes = kBarriers + 128;
};

/// CTA = (sequence, value head, 64 NS columns of V). State groups, per chunk from the last, transposed:
///   stage dS;  Y = dO P;  X = dS K^T;  dU = X e^{G_C-G} + Y;  dv = dU (T beta);
///   dS = e^{G_C} dS + (dO s e^G) Q - (dv e^G) K
/// Side group: P^T = mask(K Q^T), one chunk ahead; copies of dS and of dv (staged in the buffer of dO).
///
/// Shared memory (D = 128, NS = 2): 3 x (K 16, Q 16, dO 16, T 8) + P 2 x 8 + dS 32 = 216 KB, scales 5.
/// Barriers: full/empty[stage]; scores[2]; s_ready, s_empty staged dS; done[2] dv staged and every read
/// of the stage and of P over.
template <class M, int D, int NS>
__global__ void __launch_bounds__((NS + 2) * 128, 1) chain_kernel(const __grid_constant__ Args a) {
  using Smem = ChainSmem<M, D, NS>;
  constexpr int KS = D / 16, NB = D / 8, kStages = Smem::kStages;
  extern __shared__ __align__(1024) uint8_t smem[];
  u32 base = smem_u32(smem);
  Scales* scales = reinterpret_cast<Scales*>(smem + Smem::kScales);
  u32 full = base + Smem::kBarriers, empty = full + 24, scores_ready = full + 48, done = full + 64,
      s_ready = full + 80, s_empty = full + 88;
  Work w(a, D / 64 / NS, NS * 64);
  int group = threadIdx.x >> 7, tid = threadIdx.x & 127, lane = tid & 31, warp = tid >> 5;
  if (threadIdx.x == 0) {
    for (int i = 0; i < 3; ++i) {
      mbar_init(full + i * 8, 128);
      mbar_init(empty + i * 8, 128);
    }
    for (int i = 0; i < 2; ++i) {
      mbar_init(scores_ready + i * 8, 128);
      mbar_init(done + i * 8, NS * 128);
    }
    mbar_init(s_ready, NS * 128);
    mbar_init(s_empty, 128);
  }
  __syncthreads();

  if (group == NS + 1) {
    load_registers<M>();
    ScaleLoad row, previous;
    auto publish = [&](int i) {
      if (tid < 64) previous.store(scales[i % kStages], tid);
      fence_async_proxy();
      mbar_arrive(full + i % kStages * 8);
    };
    for (int i = 0; i < w.chunks; ++i) {
      int c = w.chunks - 1 - i, valid = w.valid(c);
      if (i >= kStages) mbar_wait(empty + i % kStages * 8, (i / kStages - 1) & 1);
      u32 k = base + i % kStages * Smem::kStage, d = k + 2 * Smem::kWide;
      int64_t t = w.token + c * kChunk;
      if (tid < 64) row.load(a, w.first_chunk + c, w.h, w.hk, tid);
      load_tile_async<D>(k, a.k + t * a.k_stride + w.hk * D, a.k_stride, valid, tid);
      load_tile_async<D>(k + Smem::kWide, a.q + t * a.q_stride + w.hk * D, a.q_stride, valid, tid);
      load_tile_async<NS * 64>(d, a.d_o + t * a.do_stride + w.h * D + w.v0, a.do_stride, valid, tid);
      load_image_async<8192>(d + NS * 8192,
                             a.solve + (int64_t{w.first_chunk + c} * a.v_heads + w.h) * 4096, tid);
      cp_async_commit();
      if constexpr (kStages > 2) {  // one chunk late, so that two are in flight
        cp_async_wait<1>();
        if (i > 0) publish(i - 1);
        previous = row;
      } else {
        previous = row;
        cp_async_wait<0>();
        publish(i);
      }
    }
    if (kStages > 2 && w.chunks > 0) {
      cp_async_wait<0>();
      publish(w.chunks - 1);
    }
    return;
  }

  if (group == NS) {
    side_registers<M>();
    auto make_scores = [&](int i) {
      int s = i % kStages;
      u32 k = base + s * Smem::kStage;
      float acc[8][4];
      u32 p[4][4];
      mbar_wait(full + s * 8, (i / kStages) & 1);
      M::fence();
      M::template ss<KS, false, false>(acc, k, k + Smem::kWide, false);
      M::commit();
      M::template wait<0>();
      pin(acc);
      score_fragments<true>(p, acc, scales[s], warp, lane);
      u32 scores = base + Smem::kScores + (i & 1) * 8192;
#pragma unroll
      for (int n = 0; n < 4; ++n) store_fragment(scores, 64, warp * 16, n * 16, lane, p[n]);
      fence_async_proxy();
      mbar_arrive(scores_ready + (i & 1) * 8);
    };
    if (w.chunks > 0) make_scores(0);
    for (int i = 0; i < w.chunks; ++i) {
      if (i + 1 < w.chunks) make_scores(i + 1);
      int c = w.chunks - 1 - i;
      int64_t image = (int64_t{w.first_chunk + c} * a.v_heads + w.h) * (D / 64) + w.v0 / 64;
      mbar_wait(s_ready, i & 1);
      store_image<NS * Smem::kWide>(a.d_states + image * 64 * D, base + Smem::kOut, tid);
      mbar_arrive(s_empty);
      mbar_wait(done + (i & 1) * 8, (i >> 1) & 1);
      store_tile<NS * 64>(a.dv + (w.token + c * kChunk) * a.dv_stride + w.h * D + w.v0,
                          base + i % kStages * Smem::kStage + 2 * Smem::kWide, a.dv_stride,
                          w.valid(c), tid);
      mbar_arrive(empty + i % kStages * 8);
    }
    return;
  }

  state_registers<M>();
  int v0 = w.v0 + group * 64;
  int64_t state_offset = (int64_t{w.sequence} * a.v_heads + w.h) * D * D;
  float s[NB][4];
  load_state(s, a.d_final_state ? a.d_final_state + state_offset : nullptr, D, v0, warp, lane);
  u32 sb[KS][4];
  for (int i = 0; i < w.chunks; ++i) {
    int stage = i % kStages;
    u32 k = base + stage * Smem::kStage, q = k + Smem::kWide, d = q + Smem::kWide + group * 8192,
        t = q + Smem::kWide + NS * 8192, scores = base + Smem::kScores + (i & 1) * 8192,
        out = base + Smem::kOut + group * Smem::kWide;
    const Scales& sc = scales[stage];
    to_fragments(sb, s);
    mbar_wait(full + stage * 8, (i / kStages) & 1);
    mbar_wait(scores_ready + (i & 1) * 8, (i >> 1) & 1);
    float x[8][4], y[8][4];
    M::fence();
    M::template ss<4, true, false>(y, d, scores, false);
    M::commit();
    M::template rs<false>(x, sb, k, false);
    M::commit();
    if (i > 0) mbar_wait(s_empty, (i - 1) & 1);
#pragma unroll
    for (int n = 0; n < KS; ++n) store_fragment(out, 64, warp * 16, n * 16, lane, sb[n]);
    mbar_arrive(s_ready);
    M::template wait<0>();
    pin(x);
    pin(y);
    pin(sb);
    u32 f[4][4], ds[4][4];
#pragma unroll
    for (int n = 0; n < 8; ++n) {
      float2 e = *reinterpret_cast<const float2*>(sc.write + n * 8 + (lane & 3) * 2);
      f[n >> 1][(n & 1) * 2] = pack_bf16(x[n][0] * e.x + y[n][0], x[n][1] * e.y + y[n][1]);
      f[n >> 1][(n & 1) * 2 + 1] = pack_bf16(x[n][2] * e.x + y[n][2], x[n][3] * e.y + y[n][3]);
    }
    M::fence();
    M::template rs<true>(x, f, t, false);
    M::commit();
#pragma unroll
    for (int n = 0; n < 4; ++n) load_fragment_trans(ds[n], d, 64, n * 16, warp * 16, lane);
    scale_fragments(ds, ds, sc.read_q, lane);
    scale(s, sc.carry);
    pin(s);
    M::fence();
    M::template rs<true>(s, ds, q, true);
    M::commit();
    M::template wait<1>();
    pin(x);
    pin(f);
    u32 dvs[4][4];
#pragma unroll
    for (int n = 0; n < 8; ++n) {
      float2 e = *reinterpret_cast<const float2*>(sc.read_k + n * 8 + (lane & 3) * 2);
      u32 &g0 = f[n >> 1][(n & 1) * 2], &g1 = f[n >> 1][(n & 1) * 2 + 1];
      g0 = pack_bf16(x[n][0], x[n][1]);
      g1 = pack_bf16(x[n][2], x[n][3]);
      dvs[n >> 1][(n & 1) * 2] = pack_bf16(-e.x * x[n][0], -e.y * x[n][1]);
      dvs[n >> 1][(n & 1) * 2 + 1] = pack_bf16(-e.x * x[n][2], -e.y * x[n][3]);
    }
    pin(s);
    M::fence();
    M::template rs<true>(s, dvs, k, true);
    M::commit();
    group_sync();  // every warp's product with dO is done: its buffer takes dv
#pragma unroll
    for (int n = 0; n < 4; ++n) store_fragment_trans(d, 64, n * 16, warp * 16, lane, f[n]);
    M::template wait<0>();
    pin(s);
    pin(ds);
    pin(dvs);
    mbar_arrive(done + (i & 1) * 8);
  }
  save_state(s, a.d_initial_state ? a.d_initial_state + state_offset : nullptr, D, v0, warp, lane);
}

template <class M, int D, int NS>
void launch(const Args& a, cudaStream_t stream) {
  constexpr u32 bytes = ChainSmem<M, D, NS>::kBytes;
  cudaFuncSetAttribute(chain_kernel<M, D, NS>, cudaFuncAttributeMaxDynamicSharedMemorySize, bytes);
  dim3 grid(a.v_heads * (D / 64 / NS), a.sequences);
  chain_kernel<M, D, NS><<<grid, (NS + 2) * 128, bytes, stream>>>(a);
  check_launch("gated_delta_net chain");
}

}  // namespace

void launch_chain(const Args& a, int head_dim, bool hopper, cudaStream_t s) {
  if (head_dim == 64)
    return hopper ? launch<MmaHopper, 64, 1>(a, s) : launch<MmaPortable, 64, 1>(a, s);
  if (!hopper) return launch<MmaPortable, 128, 1>(a, s);
  split_values(a) ? launch<MmaHopper, 128, 1>(a, s) : launch<MmaHopper, 128, 2>(a, s);
}

}  // namespace heddle::ops::cuda::gdn
