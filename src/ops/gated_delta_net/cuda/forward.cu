// Fused forward: o, final state and the written values u of one segment and value head.
#include "serial.cuh"

namespace heddle::ops::cuda::gdn {
namespace {

template <class M, int D, int NS>
struct ForwardSmem {
  static constexpr int kStages = kStagesOf<M, D>;
  static constexpr u32 kWide = 64 * D * 2;                    // K or Q tile
  static constexpr u32 kStage = 2 * kWide + (NS + 1) * 8192;  // K, Q, V (later U), T
  static constexpr u32 kScores = kStages * kStage;
  static constexpr u32 kOut = kScores + 2 * 8192;
  static constexpr u32 kScales = kOut + NS * 8192;
  static constexpr u32 kBarriers = kScales + kStages * sizeof(SolveScales);
  static constexpr u32 kBytes = kBarriers + 128;
};

/// 1 / |q| of a chunk from its tile, by the 64 kPerRow threads that `tid` counts: with the scale
/// and the fit of its row of P into the scales and, where keep is set, as it is for the backward.
template <int D, int kPerRow>
__device__ __forceinline__ void query_norms(const Args& a, const Work& w, int c, bool keep, u32 q,
                                            SolveScales& s, int tid) {
  constexpr int kPieces = D / 8 / kPerRow;  // of 16 bytes, a thread
  int r = tid / kPerRow, part = tid % kPerRow;
  u32 row = tile_address(q, 64, r, 0);  // its piece i lies at row ^ 16 i, see tile_address
  float even = 0, odd = 0;
#pragma unroll 4
  for (int n = 0; n < kPieces; ++n) {
    int i = part * kPieces + n;
    uint4 x = ld_shared16((row ^ (i % 8 * 16)) + i / 8 * 8192);
    const u32 e[4] = {x.x, x.y, x.z, x.w};
#pragma unroll
    for (int m = 0; m < 4; ++m) {
      even = fmaf(bf16_lo(e[m]), bf16_lo(e[m]), even);
      odd = fmaf(bf16_hi(e[m]), bf16_hi(e[m]), odd);
    }
  }
  float sum = even + odd;
  if constexpr (kPerRow == 2) sum += __shfl_xor_sync(~0u, sum, 1);
  if (part != 0) return;
  float norm = r < w.valid(c) ? (a.normalize ? rsqrtf(sum + 1e-6f) : 1.f) : 0.f;
  s.q[r] = norm * a.scale * s.fit[r];
  if (keep) a.q_rms[(int64_t{w.first_chunk + c} * a.k_heads + w.hk) * 64 + r] = norm;
}

/// CTA = (segment, value head, 64 NS columns of V). State groups, per chunk, all transposed, with
/// S^T (fp32) and every left operand in registers:
///
///   X = S K^T,  O = S Q^T,  U = (V - X e^G) T'^T beta,  S = e^{G_C} S + (U e^{G_C-G}) K,
///   O = (O e^G + U P^T) s / |q|
///
/// A chunk's last product and its output are left for the next chunk's first product to hide.
///
/// Side group: P = mask(Q K^T), one chunk ahead. Load group: copies U (staged in the buffer of V)
/// and O out, then refills that chunk's stage. Half of it, idle with bulk copies, makes 1 / |q|
/// (portable: the side group).
///
/// Shared memory (D = 128, NS = 2): 3 x (K 16, Q 16, V 16, T 8) + P 2 x 8 + O 16 = 200 KB,
/// scales 6.
///
/// Barriers: full[stage] tiles and scales; scores[2] P stored; norms[stage] 1 / |q| stored; done[2]
/// U and O staged and every read of the stage and of P over; o_empty O copied out, without which a
/// state group goes no further than one chunk ahead of the load group.
template <class M, int D, int NS>
__global__ void __launch_bounds__((NS + 2) * 128, 1)
    forward_kernel(const __grid_constant__ Args a) {
  using Smem = ForwardSmem<M, D, NS>;
  constexpr int KS = D / 16, NB = D / 8, kStages = Smem::kStages;
  extern __shared__ __align__(1024) uint8_t smem[];
  u32 base = smem_u32(smem);
  SolveScales* scales = reinterpret_cast<SolveScales*>(smem + Smem::kScales);
  u32 full = base + Smem::kBarriers, scores_ready = full + 24, done = full + 40,
      o_empty = full + 56, norms_ready = full + 64;
  if (threadIdx.x == 0) {
    for (int i = 0; i < 3; ++i) {
      mbar_init(full + i * 8, kLoaders<M>);
      mbar_init(norms_ready + i * 8, M::kHopper ? 64 : 128);
    }
    for (int i = 0; i < 2; ++i) {
      mbar_init(scores_ready + i * 8, 128);
      mbar_init(done + i * 8, NS * 128);
    }
    mbar_init(o_empty, kLoaders<M>);
    fence_async_proxy();  // bulk copies see them
  }
  __syncthreads();
  wait_for_previous_kernel();
  Work w(a, blockIdx.y, blockIdx.x, D / 64 / NS, NS * 64);
  if (w.sequence < 0) return;
  bool keep_norms = w.v0 == 0 && w.h % (a.v_heads / a.k_heads) == 0;
  int group = threadIdx.x >> 7, tid = threadIdx.x & 127, lane = tid & 31, warp = tid >> 5;

  if (group == NS + 1) {
    load_registers<M>();
    constexpr int L = kLoaders<M>;
    if (M::kHopper && tid >= 64) {
      for (int c = 0; c < w.chunks; ++c) {
        int s = c % kStages;
        mbar_wait(full + s * 8, (c / kStages) & 1);
        mbar_wait(scores_ready + (c & 1) * 8, (c >> 1) & 1);
        query_norms<D, 1>(a, w, c, keep_norms, base + s * Smem::kStage + Smem::kWide, scales[s],
                          tid - 64);
        mbar_arrive(norms_ready + s * 8);
      }
      return;
    }
    if (tid >= L) return;
    ScaleRows<L, false> rows;  // of the next chunk to load
    if (w.chunks > 0) rows.load(a, w.first_chunk, w.h, w.hk, tid);
    for (int c = 0; c < w.chunks + kStages; ++c) {
      u32 stage = base + c % kStages * Smem::kStage, v = stage + 2 * Smem::kWide;
      int old = c - kStages;  // the last user of this stage
      if (old >= 0 && old < w.chunks) {
        mbar_wait(done + (old & 1) * 8, (old >> 1) & 1);
        store_chunk<M, D, NS>(a, w, old, base + Smem::kOut, kMapO, a.o, a.o_stride, tid);
        if (a.u != nullptr)
          store_chunk<M, D, NS>(a, w, old, v, kMapU, a.u, int64_t{a.v_heads} * D, tid);
        bulk_wait_read<0>();
        mbar_arrive(o_empty);
        loaders_sync<M>();  // the stage has been read
      }
      if (c >= w.chunks) continue;
      rows.store(scales[c % kStages], tid);
      if (c + 1 < w.chunks) rows.load(a, w.first_chunk + c + 1, w.h, w.hk, tid);
      load_stage<M, D, NS>(a, w, c, stage, full + c % kStages * 8, kMapV, a.v, a.v_stride, tid);
    }
    cp_async_wait<0>();
    bulk_wait_all();
    return;
  }

  if (group == NS) {
    side_registers<M>();
    for (int c = 0; c < w.chunks; ++c) {
      int s = c % kStages;
      u32 k = base + s * Smem::kStage, scores = base + Smem::kScores + (c & 1) * 8192;
      float acc[8][4];
      u32 p[4][4];
      wait_filled(full + s * 8, (c / kStages) & 1, !M::kHopper || w.valid(c) < kChunk);
      M::fence();
      M::template ss<KS, false, false>(acc, k + Smem::kWide, k, false);
      M::commit();
      M::template wait<0>();
      pin(acc);
      fitted_score_fragments(p, acc, scales[s], warp, lane);
      if (c >= 2) mbar_wait(done + (c & 1) * 8, ((c >> 1) - 1) & 1);
#pragma unroll
      for (int n = 0; n < 4; ++n) store_fragment(scores, 64, warp * 16, n * 16, lane, p[n]);
      fence_async_proxy();
      mbar_arrive(scores_ready + (c & 1) * 8);
      if constexpr (!M::kHopper) {
        group_sync();  // the fit of other warps' rows
        query_norms<D, 2>(a, w, c, keep_norms, k + Smem::kWide, scales[s], tid);
        mbar_arrive(norms_ready + s * 8);
      }
    }
    return;
  }

  state_registers<M, NS>();
  int v0 = w.v0 + group * 64;
  float s[NB][4];
  load_state(s, w.state(a, w.entry, a.joint_states, a.initial_state, D), D, v0, warp, lane);
  u32 sb[KS][4], f[4][4], us[4][4];
  float x[8][4], o[8][4];
  // X of chunk c. No product is issued under a condition, or the compiler puts waits between them.
  auto read = [&](int c) {
    wait_filled(full + c % kStages * 8, (c / kStages) & 1, !M::kHopper || w.valid(c) < kChunk);
    M::fence();
    M::template rs<false>(x, sb, base + c % kStages * Smem::kStage, false);
    M::commit();
  };
  auto attend = [&](u32 q) {
    M::template rs<false>(o, sb, q, false);
    M::commit();
  };
  // With registers for O beside all that T multiplies, O is made while U is converted.
  constexpr bool kRoomy = M::kHopper && NS == 1;
  // Products that complete at once (portable) gain nothing from an early start, which costs
  // registers.
  if constexpr (M::kHopper) {
    to_fragments(sb, s);
    if (w.chunks > 0) read(0);
  }
  for (int c = 0; c < w.chunks; ++c) {
    int stage = c % kStages;
    u32 k = base + stage * Smem::kStage, q = k + Smem::kWide, v = q + Smem::kWide + group * 8192,
        t = q + Smem::kWide + NS * 8192, scores = base + Smem::kScores + (c & 1) * 8192,
        out = base + Smem::kOut + group * 8192;
    const SolveScales& sc = scales[stage];
    if constexpr (!M::kHopper) {
      to_fragments(sb, s);
      read(c);
    }
    M::template wait<0>();
    pin(x);
    residual_fragments(f, x, v, sc.read_k, warp, lane);
    M::fence();
    M::template rs<false>(x, f, t, false);
    M::commit();
    if constexpr (kRoomy) attend(q);
    scale(s, sc.carry);
    M::template wait<kRoomy>();
    pin(x);
    pin(f);
    // S advances by the rounded u that is saved, so that the backward's replay of S is exact:
    // without decay, differences between the two would add up over the whole sequence.
    to_fragments(f, x, sc.beta, lane);
    if constexpr (!M::kHopper) attend(q);  // before there are more fragments: registers are short
    scale_fragments(us, f, sc.write, lane);
    pin(s);
    M::fence();
    if constexpr (M::kHopper && !kRoomy) attend(q);
    M::template rs<true>(s, us, k, true);
    M::commit();
    mbar_wait(scores_ready + (c & 1) * 8, (c >> 1) & 1);
    M::template wait<1>();
    pin(o);
    if constexpr (M::kHopper) pin(sb);
#pragma unroll
    for (int n = 0; n < 8; ++n) {
      float2 e = *reinterpret_cast<const float2*>(sc.read_q + n * 8 + (lane & 3) * 2);
      o[n][0] *= e.x;
      o[n][1] *= e.y;
      o[n][2] *= e.x;
      o[n][3] *= e.y;
    }
    pin(o);
    M::fence();
    M::template rs<false>(o, f, scores, true);
    M::commit();
    if (a.u != nullptr) {  // a warp reads and overwrites only its own 16 columns of V
#pragma unroll
      for (int n = 0; n < 4; ++n) store_fragment_trans(v, 64, n * 16, warp * 16, lane, f[n]);
    }
    M::template wait<1>();
    pin(s);
    if constexpr (M::kHopper) {
      pin(us);
      to_fragments(sb, s);
    }
    M::template wait<0>();
    pin(o);
    pin(f);
    if constexpr (M::kHopper) read(min(c + 1, w.chunks - 1));  // after the last chunk for nothing
    mbar_wait(norms_ready + stage * 8, (c / kStages) & 1);
    to_fragments(f, o, sc.q, lane);
    if (c > 0) mbar_wait(o_empty, (c - 1) & 1);
#pragma unroll
    for (int n = 0; n < 4; ++n) store_fragment_trans(out, 64, n * 16, warp * 16, lane, f[n]);
    fence_async_proxy();  // U and O leave by bulk copy
    mbar_arrive(done + (c & 1) * 8);
  }
  M::template wait<0>();
  if constexpr (M::kHopper) {
    pin(x);
    pin(sb);
  }
  if (w.exit < 0)
    save_state(s, w.state(a, w.exit, a.joint_states, a.final_state, D), D, v0, warp, lane);
}

template <class M, int D, int NS>
void launch(const Args& a, cudaStream_t stream) {
  constexpr u32 bytes = ForwardSmem<M, D, NS>::kBytes;
  cudaFuncSetAttribute(forward_kernel<M, D, NS>, cudaFuncAttributeMaxDynamicSharedMemorySize,
                       bytes);
  dim3 grid(a.v_heads * (D / 64 / NS), a.max_segments);
  launch_after(forward_kernel<M, D, NS>, grid, (NS + 2) * 128, bytes, M::kHopper, stream, a);
  check_launch("gated_delta_net forward");
}

}  // namespace

size_t forward_shared_bytes(int head_dim, bool hopper) {
  if (head_dim == 256) return ForwardSmem<MmaPortable, 256, 1>::kBytes;
  if (head_dim == 64)
    return hopper ? ForwardSmem<MmaHopper, 64, 1>::kBytes : ForwardSmem<MmaPortable, 64, 1>::kBytes;
  return hopper ? ForwardSmem<MmaHopper, 128, 2>::kBytes : ForwardSmem<MmaPortable, 128, 1>::kBytes;
}

void launch_forward(const Args& a, int head_dim, bool hopper, cudaStream_t s) {
  if (head_dim == 256) return launch<MmaPortable, 256, 1>(a, s);
  if (head_dim == 64)
    return hopper ? launch<MmaHopper, 64, 1>(a, s) : launch<MmaPortable, 64, 1>(a, s);
  if (!hopper) return launch<MmaPortable, 128, 1>(a, s);
  split_values(a) ? launch<MmaHopper, 128, 1>(a, s) : launch<MmaHopper, 128, 2>(a, s);
}

}  // namespace heddle::ops::cuda::gdn
