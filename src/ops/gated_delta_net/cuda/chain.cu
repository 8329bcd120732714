// The serial passes of the backward: the states at chunk entries (states.cuh) and, in reverse, the
// gradient of the state after every chunk together with dv. Where sequences are split, the
// gradients at the joints come first (docs/gdn.md, "Several segments at once").
#include <algorithm>

#include "states.cuh"

namespace heddle::ops::cuda::gdn {
namespace {

template <class M, int D, int NS>
struct ChainSmem {
  static constexpr int kStages = kStagesOf<M, D>;
  static constexpr u32 kWide = 64 * D * 2;
  static constexpr u32 kStage = 2 * kWide + (NS + 1) * 8192;  // K, Q, dO (later dv), T
  static constexpr u32 kScores = kStages * kStage;
  static constexpr u32 kOut = kScores + 2 * 8192;
  static constexpr u32 kScales = kOut + NS * kWide;
  static constexpr u32 kBarriers = kScales + kStages * sizeof(SolveScales);
  static constexpr u32 kBytes = kBarriers + 128;
};

/// CTA = (segment, value head, 64 NS columns of V). State groups, per chunk from the last,
/// transposed:
///
///   stage dS,  Y = dO P,  X = dS K^T,  dU = X e^{G_C-G} + Y,  dv = dU beta T',
///   dS = e^{G_C} dS + (dO s e^G) Q - (dv e^G) K
///
/// Side group: P^T = mask(K Q^T), one chunk ahead. Load group: copies dv (staged in the buffer of
/// dO) out, then refills that chunk's stage; another thread of it copies dS (portable: the side
/// group).
///
/// kEnds: only the gradient left at the segment's entry when none enters at its exit (that of a
/// sequence's end is known), without the chunks that the entry cannot see; no dv, no dS.
///
/// Shared memory (D = 128, NS = 2): 3 x (K 16, Q 16, dO 16, T 8) + P 2 x 8 + dS 32 = 216 KB,
/// scales 6.
///
/// Barriers: full[stage]; scores[2]; s_ready, s_empty staged dS; done[3] dv staged and every read
/// of the stage and of P over. The state groups may be two chunks ahead of the load group, which is
/// one more than two barriers can tell apart.
template <class M, int D, int NS, bool kEnds>
__device__ __forceinline__ void chain_pass(const Args& a) {
  using Smem = ChainSmem<M, D, NS>;
  constexpr int KS = D / 16, NB = D / 8, kStages = Smem::kStages;
  extern __shared__ __align__(1024) uint8_t smem[];
  u32 base = smem_u32(smem);
  SolveScales* scales = reinterpret_cast<SolveScales*>(smem + Smem::kScales);
  u32 full = base + Smem::kBarriers, scores_ready = full + 24, done = full + 40,
      s_ready = full + 64, s_empty = full + 72;
  Work w(a, blockIdx.y, blockIdx.x, D / 64 / NS, NS * 64);
  int group = threadIdx.x >> 7, tid = threadIdx.x & 127, lane = tid & 31, warp = tid >> 5;
  if (w.sequence < 0) return;
  bool across = true;
  if constexpr (kEnds) {
    if (w.entry < 0) return;
    Reach reach(a, w, /*from_end=*/false, lane);
    w.keep_first(reach.chunks);
    across = reach.across;
  }
  if (threadIdx.x == 0) {
    for (int i = 0; i < 3; ++i) {
      mbar_init(full + i * 8, kLoaders<M>);
      mbar_init(done + i * 8, NS * 128);
    }
    for (int i = 0; i < 2; ++i) mbar_init(scores_ready + i * 8, 128);
    mbar_init(s_ready, NS * 128);
    mbar_init(s_empty, M::kHopper ? 1 : 128);
    fence_async_proxy();  // bulk copies see them
  }
  __syncthreads();

  auto image = [&](int i) {
    return (int64_t{w.first_chunk + w.chunks - 1 - i} * a.v_heads + w.h) * (D / 64) + w.v0 / 64;
  };
  if (group == NS + 1) {
    load_registers<M>();
    constexpr int L = kLoaders<M>;
    if (M::kHopper && !kEnds && tid == 32) {  // a thread of its own for dS
      for (int i = 0; i < w.chunks; ++i) {
        mbar_wait(s_ready, i & 1);
        bulk_store(a.d_states + image(i) * 64 * D, base + Smem::kOut, NS * Smem::kWide);
        bulk_commit();
        bulk_wait_read<0>();
        mbar_arrive(s_empty);
      }
      bulk_wait_all();
    }
    if (tid >= L) return;
    ScaleRows<L, true> rows;  // of the next chunk to load
    if (w.chunks > 0) rows.load(a, w.first_chunk + w.chunks - 1, w.h, w.hk, tid);
    for (int i = 0; i < w.chunks + kStages; ++i) {
      u32 stage = base + i % kStages * Smem::kStage;
      int old = i - kStages, c = w.chunks - 1 - i;  // old: the last user of this stage
      if (old >= 0 && old < w.chunks) {
        mbar_wait(done + old % 3 * 8, (old / 3) & 1);
        if constexpr (!kEnds) {
          store_chunk<M, D, NS>(a, w, w.chunks - 1 - old, stage + 2 * Smem::kWide, kMapGradV, a.dv,
                                a.dv_stride, tid);
          bulk_wait_read<0>();
        }
        loaders_sync<M>();  // the stage has been read
      }
      if (c < 0) continue;
      rows.store(scales[i % kStages], tid);
      if (c > 0) rows.load(a, w.first_chunk + c - 1, w.h, w.hk, tid);
      load_stage<M, D, NS>(a, w, c, stage, full + i % kStages * 8, kMapGradO, a.d_o, a.do_stride,
                           tid);
    }
    cp_async_wait<0>();
    bulk_wait_all();
    return;
  }

  if (group == NS) {
    side_registers<M>();
    auto copy_state = [&](int i) {
      if (M::kHopper || kEnds) return;
      mbar_wait(s_ready, i & 1);
      store_image<NS * Smem::kWide>(a.d_states + image(i) * 64 * D, base + Smem::kOut, tid);
      mbar_arrive(s_empty);
    };
    for (int i = 0; i < w.chunks; ++i) {
      int s = i % kStages;
      u32 k = base + s * Smem::kStage, scores = base + Smem::kScores + (i & 1) * 8192;
      float acc[8][4];
      u32 p[4][4];
      wait_filled(full + s * 8, (i / kStages) & 1,
                  !M::kHopper || w.valid(w.chunks - 1 - i) < kChunk);
      M::fence();
      M::template ss<KS, false, false>(acc, k, k + Smem::kWide, false);
      M::commit();
      M::template wait<0>();
      pin(acc);
      score_fragments<true>(p, acc, scales[s], warp, lane);
      if (i >= 2) mbar_wait(done + (i - 2) % 3 * 8, ((i - 2) / 3) & 1);
#pragma unroll
      for (int n = 0; n < 4; ++n) store_fragment(scores, 64, warp * 16, n * 16, lane, p[n]);
      fence_async_proxy();
      mbar_arrive(scores_ready + (i & 1) * 8);
      if (i > 0) copy_state(i - 1);
    }
    if (w.chunks > 0) copy_state(w.chunks - 1);
    return;
  }

  state_registers<M, NS>();
  int v0 = w.v0 + group * 64;
  float s[NB][4];
  const float* known = w.state(a, w.exit, kEnds ? nullptr : a.joint_gradients, a.d_final_state, D);
  load_state(s, across ? known : nullptr, D, v0, warp, lane);
  u32 sb[KS][4];
  for (int i = 0; i < w.chunks; ++i) {
    int stage = i % kStages;
    u32 k = base + stage * Smem::kStage, q = k + Smem::kWide, d = q + Smem::kWide + group * 8192,
        t = q + Smem::kWide + NS * 8192, scores = base + Smem::kScores + (i & 1) * 8192,
        out = base + Smem::kOut + group * Smem::kWide;
    const SolveScales& sc = scales[stage];
    to_fragments(sb, s);
    wait_filled(full + stage * 8, (i / kStages) & 1,
                !M::kHopper || w.valid(w.chunks - 1 - i) < kChunk);
    mbar_wait(scores_ready + (i & 1) * 8, (i >> 1) & 1);
    float x[8][4], y[8][4];
    M::fence();
    M::template ss<4, true, false>(y, d, scores, false);
    M::commit();
    M::template rs<false>(x, sb, k, false);
    M::commit();
    if constexpr (!kEnds) {
      if (i > 0) mbar_wait(s_empty, (i - 1) & 1);
#pragma unroll
      for (int n = 0; n < KS; ++n) store_fragment(out, 64, warp * 16, n * 16, lane, sb[n]);
      fence_async_proxy();  // dS leaves by bulk copy
      mbar_arrive(s_ready);
    }
    M::template wait<0>();
    pin(x);
    pin(y);
    pin(sb);
    u32 f[4][4], ds[4][4];
#pragma unroll
    for (int n = 0; n < 8; ++n) {
      float2 e = *reinterpret_cast<const float2*>(sc.write + n * 8 + (lane & 3) * 2);
      float2 b = *reinterpret_cast<const float2*>(sc.beta + n * 8 + (lane & 3) * 2);
#pragma unroll
      for (int r = 0; r < 4; r += 2)
        f[n >> 1][(n & 1) * 2 + r / 2] =
            pack_bf16((x[n][r] * e.x + y[n][r]) * b.x, (x[n][r + 1] * e.y + y[n][r + 1]) * b.y);
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
    if constexpr (!kEnds) {
      group_sync();  // every warp's product with dO is done: its buffer takes dv
#pragma unroll
      for (int n = 0; n < 4; ++n) store_fragment_trans(d, 64, n * 16, warp * 16, lane, f[n]);
    }
    M::template wait<0>();
    pin(s);
    pin(ds);
    pin(dvs);
    if constexpr (!kEnds) fence_async_proxy();  // dv leaves by bulk copy
    mbar_arrive(done + i % 3 * 8);
  }
  if (kEnds || w.entry < 0)
    save_state(s, w.state(a, w.entry, a.joint_gradients, a.d_initial_state, D), D, v0, warp, lane);
}

/// The passes do not depend on each other, so with few segment-heads they run side by side. The
/// longer one comes first.
template <class M, int D, int NS, bool kEnds>
__global__ void __launch_bounds__((NS + 2) * 128, 1) serial_kernel(const __grid_constant__ Args a) {
  if (blockIdx.z == 0)
    chain_pass<M, D, NS, kEnds>(a);
  else
    states_pass<M, D, NS>(a);
}

template <class M, int D, int NS>
constexpr u32 kSerialBytes = std::max(ChainSmem<M, D, NS>::kBytes, StatesSmem<M, D, NS>::kBytes);

/// passes: 1 for the chain alone, 2 for the states beside it.
template <class M, int D, int NS, bool kEnds>
void launch_passes(const Args& a, int passes, cudaStream_t stream) {
  constexpr u32 bytes = kSerialBytes<M, D, NS>;
  auto kernel = serial_kernel<M, D, NS, kEnds>;
  cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, bytes);
  dim3 grid(a.v_heads * (D / 64 / NS), a.max_segments, passes);
  kernel<<<grid, (NS + 2) * 128, bytes, stream>>>(a);
  check_launch("gated_delta_net serial passes");
}

template <class M, int D, int NS>
void launch(const Args& a, cudaStream_t stream) {
  if (a.max_joints == 0) return launch_passes<M, D, NS, false>(a, 2, stream);
  launch_passes<M, D, NS, true>(a, 2, stream);
  launch_join_gradients(a, D, stream);
  launch_passes<M, D, NS, false>(a, 1, stream);
}

}  // namespace

size_t serial_shared_bytes(int head_dim, bool hopper) {
  if (head_dim == 256) return kSerialBytes<MmaPortable, 256, 1>;
  if (head_dim == 64)
    return hopper ? kSerialBytes<MmaHopper, 64, 1> : kSerialBytes<MmaPortable, 64, 1>;
  return hopper ? kSerialBytes<MmaHopper, 128, 2> : kSerialBytes<MmaPortable, 128, 1>;
}

void launch_serial(const Args& a, int head_dim, bool hopper, cudaStream_t s) {
  if (head_dim == 256) return launch<MmaPortable, 256, 1>(a, s);
  if (head_dim == 64)
    return hopper ? launch<MmaHopper, 64, 1>(a, s) : launch<MmaPortable, 64, 1>(a, s);
  if (!hopper) return launch<MmaPortable, 128, 1>(a, s);
  split_values(a) ? launch<MmaHopper, 128, 1>(a, s) : launch<MmaHopper, 128, 2>(a, s);
}

}  // namespace heddle::ops::cuda::gdn
