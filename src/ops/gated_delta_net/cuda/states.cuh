// Backward: the state at the entry of every chunk, from the saved u.
#pragma once

#include "serial.cuh"

namespace heddle::ops::cuda::gdn {

template <class M, int D, int NS>
struct StatesSmem {
  static constexpr int kStages = kStagesOf<M, D>;
  static constexpr u32 kWide = 64 * D * 2;
  static constexpr u32 kStage = kWide + NS * 8192;  // K, U
  static constexpr u32 kOut = kStages * kStage;     // two buffers of NS images
  static constexpr u32 kScales = kOut + 2 * NS * kWide;
  static constexpr u32 kBarriers = kScales + kStages * sizeof(Scales);
  static constexpr u32 kBytes = kBarriers + 128;
};

/// CTA = (segment, value head, 64 NS columns of V). Per chunk: S^T is staged in bf16, then
/// S = e^{G_C} S + (U e^{G_C-G}) K with U^T scaled in registers. The side group copies the images
/// out.
///
/// Shared memory (D = 128, NS = 2): 3 x (K 16, U 16) + 2 x 32 = 160 KB, scales 5 KB.
template <class M, int D, int NS>
__device__ __forceinline__ void states_pass(const Args& a) {
  using Smem = StatesSmem<M, D, NS>;
  constexpr int KS = D / 16, NB = D / 8, kStages = Smem::kStages;
  extern __shared__ __align__(1024) uint8_t smem[];
  u32 base = smem_u32(smem);
  Scales* scales = reinterpret_cast<Scales*>(smem + Smem::kScales);
  u32 full = base + Smem::kBarriers, empty = full + 24, ready = full + 48, copied = full + 64;
  Work w(a, blockIdx.y, blockIdx.x, D / 64 / NS, NS * 64);
  if (w.sequence < 0) return;
  int group = threadIdx.x >> 7, tid = threadIdx.x & 127, lane = tid & 31, warp = tid >> 5;
  if (threadIdx.x == 0) {
    for (int i = 0; i < 3; ++i) {
      mbar_init(full + i * 8, kLoaders<M>);
      mbar_init(empty + i * 8, NS * 128);
    }
    for (int i = 0; i < 2; ++i) {
      mbar_init(ready + i * 8, NS * 128);
      mbar_init(copied + i * 8, M::kHopper ? 1 : 128);
    }
    fence_async_proxy();  // bulk copies see them
  }
  __syncthreads();

  if (group == NS + 1) {
    load_registers<M>();
    constexpr int L = kLoaders<M>;
    if (tid >= L) return;
    ScaleRows<L, false, false> rows;  // of the next chunk to load
    if (w.chunks > 0) rows.load(a, w.first_chunk, w.h, w.hk, tid);
    for (int c = 0; c < w.chunks; ++c) {
      int s = c % kStages, valid = w.valid(c);
      if (c >= kStages) mbar_wait(empty + s * 8, (c / kStages - 1) & 1);
      u32 k = base + s * Smem::kStage, u = k + Smem::kWide;
      int64_t t = w.token + c * kChunk;
      rows.store(scales[s], tid);
      if (c + 1 < w.chunks) rows.load(a, w.first_chunk + c + 1, w.h, w.hk, tid);
      if (M::kHopper && valid == kChunk) {
        if (tid > 0) {
          mbar_arrive(full + s * 8);
          continue;
        }
        mbar_expect(full + s * 8, Smem::kStage);
#pragma unroll
        for (int b = 0; b < D / 64; ++b)
          bulk_load_box(k + b * 8192, &a.maps[kMapK], w.hk * D + b * 64, t, full + s * 8);
#pragma unroll
        for (int b = 0; b < NS; ++b)
          bulk_load_box(u + b * 8192, &a.maps[kMapU], w.h * D + w.v0 + b * 64, t, full + s * 8);
        continue;
      }
      load_tile_async<D, L>(k, a.k + t * a.k_stride + w.hk * D, a.k_stride, valid, tid);
      load_tile_async<NS * 64, L>(u, a.u + (t * a.v_heads + w.h) * D + w.v0, int64_t{a.v_heads} * D,
                                  valid, tid);
      cp_async_arrive(full + s * 8);
    }
    cp_async_wait<0>();
    return;
  }

  if (group == NS) {
    side_registers<M>();
    if (M::kHopper && tid > 0) return;
    for (int c = 0; c < w.chunks; ++c) {
      mbar_wait(ready + (c & 1) * 8, (c >> 1) & 1);
      int64_t image = (int64_t{w.first_chunk + c} * a.v_heads + w.h) * (D / 64) + w.v0 / 64;
      bf16* dst = a.states + image * 64 * D;
      u32 src = base + Smem::kOut + (c & 1) * NS * Smem::kWide;
      if constexpr (M::kHopper) {
        bulk_store(dst, src, NS * Smem::kWide);
        bulk_commit();
        bulk_wait_read<0>();
      } else {
        store_image<NS * Smem::kWide>(dst, src, tid);
      }
      mbar_arrive(copied + (c & 1) * 8);
    }
    bulk_wait_all();
    return;
  }

  state_registers<M, NS>();
  float s[NB][4];
  load_state(s, w.state(a, w.entry, a.joint_states, a.initial_state, D), D, w.v0 + group * 64, warp,
             lane);
  for (int c = 0; c < w.chunks; ++c) {
    int stage = c % kStages;
    u32 k = base + stage * Smem::kStage,
        out = base + Smem::kOut + ((c & 1) * NS + group) * Smem::kWide;
    u32 sb[KS][4], us[4][4];
    to_fragments(sb, s);
    if (c >= 2) mbar_wait(copied + (c & 1) * 8, ((c >> 1) - 1) & 1);
#pragma unroll
    for (int n = 0; n < KS; ++n) store_fragment(out, 64, warp * 16, n * 16, lane, sb[n]);
    fence_async_proxy();  // the image leaves by bulk copy
    mbar_arrive(ready + (c & 1) * 8);
    wait_filled(full + stage * 8, (c / kStages) & 1, !M::kHopper || w.valid(c) < kChunk);
    const Scales& sc = scales[stage];
#pragma unroll
    for (int n = 0; n < 4; ++n)
      load_fragment_trans(us[n], k + Smem::kWide + group * 8192, 64, n * 16, warp * 16, lane);
    scale_fragments(us, us, sc.write, lane);
    scale(s, sc.carry);
    pin(s);
    M::fence();
    M::template rs<true>(s, us, k, true);
    M::commit();
    M::template wait<0>();
    pin(s);
    pin(us);
    mbar_arrive(empty + stage * 8);
  }
}

}  // namespace heddle::ops::cuda::gdn
