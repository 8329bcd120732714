// Last launch of the backward, parallel over chunks: dq, dk, dg, dbeta.
#include "gradients.cuh"

namespace heddle::ops::cuda::gdn {
namespace {

template <class M, int D>
struct GradientSmem {
  static constexpr int kParts = D / 64;
  static constexpr int kTiles = 3 + 2 * kParts;  // per value head: U, dO, dv, then h and dS by part
  // U is held until the last tile of its head, so the ring cannot be shorter than kTiles.
  static constexpr int kRing = M::kHopper ? 8 : kTiles;
  static constexpr int kPairs = M::kHopper ? 2 : 1;  // Q, K buffers
  static constexpr int kScaleSets = M::kHopper ? 3 : 1;
  static constexpr u32 kWide = 64 * D * 2;
  static constexpr u32 kPair = kRing * kWide;
  static constexpr u32 kProducts = kPair + kPairs * 2 * kWide;  // dP, D
  static constexpr u32 kScales = kProducts + 2 * 8192;
  static constexpr u32 kRows = kScales + kScaleSets * sizeof(Scales);
  static constexpr u32 kBarriers = kRows + (3 * 64 + 32) * 4;
  static constexpr u32 kBytes = kBarriers + 256;
};

/// Persistent CTA over (chunk, key head); value heads of the group in turn, all tiles through one
/// ring.
///
/// Group 0: dP = mask(dO U^T), dq = (dO h^T) s e^G + dP K, <dS, h>.
///
/// Group 1: D = -mask(dv U^T), whose diagonal gives dbeta; dk_read = -(dv h^T) e^G + D K;
/// dk_write = (U dS^T) e^{G_C-G} + dP^T Q + D^T K.
///
/// dg is the reverse cumulative sum of q.dq + k.dk_read - k.dk_write, with <dS, S_C> added at the
/// last row, S_C = e^{G_C} h + sum of writes. dP and D are rounded once and feed every product and,
/// through dq and dk, dg, so its cancellations are exact.
///
/// Shared memory (D = 128): ring 8 x 16, Q and K 2 x 32, dP and D 16 = 208 KB, scales and rows 6
/// KB.
///
/// Barriers: full/empty[slot]; pair_full/pair_empty[buffer]; product_ready/product_empty for dP;
/// rows_ready[2] for group 0's row sums.
template <class M, int D>
__global__ void __launch_bounds__(384, 1) gradients_kernel(const __grid_constant__ Args a) {
  using Smem = GradientSmem<M, D>;
  constexpr int NB = D / 8, kParts = Smem::kParts, kTiles = Smem::kTiles, kRing = Smem::kRing,
                kPairs = Smem::kPairs, kSets = Smem::kScaleSets;
  constexpr u32 kWide = Smem::kWide;
  extern __shared__ __align__(1024) uint8_t smem[];
  u32 base = smem_u32(smem);
  Scales* scales = reinterpret_cast<Scales*>(smem + Smem::kScales);
  float* rows =
      reinterpret_cast<float*>(smem + Smem::kRows);  // [2][64] group 0, [64] group 1, sums
  float* sums = rows + 192;  // [0..7] group 0's <dS, h> by warp and parity, [8..11] group 1's
  u32 full = base + Smem::kBarriers, empty = full + 64, pair_full = full + 128,
      pair_empty = full + 144, product_ready = full + 160, product_empty = full + 168,
      rows_ready = full + 176;
  int group = threadIdx.x >> 7, tid = threadIdx.x & 127, lane = tid & 31, warp = tid >> 5;
  if (threadIdx.x == 0) {
    for (int i = 0; i < 8; ++i) {
      mbar_init(full + i * 8, 128);
      mbar_init(empty + i * 8, 256);
    }
    for (int i = 0; i < 2; ++i) {
      mbar_init(pair_full + i * 8, 128);
      mbar_init(pair_empty + i * 8, 256);
      mbar_init(rows_ready + i * 8, 128);
    }
    mbar_init(product_ready, 128);
    mbar_init(product_empty, 128);
  }
  __syncthreads();
  int items = a.first_chunk[a.sequences] * a.k_heads, heads = a.v_heads / a.k_heads;
  int tile = 0, head = 0, pair = 0;  // running counts, the same in every group

  if (group == 2) {
    if constexpr (M::kHopper) set_max_registers_down<56>();
    // Table entries and scales are fetched one step ahead of their use.
    ChunkInfo info{};
    ScaleLoad<true, false> scale_row{};
    auto fetch_scales = [&](int item, int n) {
      int hk = item % a.k_heads;
      if (item < items && tid < 64) scale_row.load(a, item / a.k_heads, hk * heads + n, hk, tid);
    };
    if (blockIdx.x < items) info = a.chunks[blockIdx.x / a.k_heads];
    fetch_scales(blockIdx.x, 0);
    for (int item = blockIdx.x; item < items; item += gridDim.x, ++pair) {
      int chunk = item / a.k_heads, hk = item % a.k_heads, after = item + gridDim.x;
      int64_t t = info.token;
      int length = info.length;
      if (after < items) info = a.chunks[after / a.k_heads];
      int b = pair % kPairs;
      if (pair >= kPairs) mbar_wait(pair_empty + b * 8, (pair / kPairs - 1) & 1);
      u32 q = base + Smem::kPair + b * 2 * kWide;
      load_tile_async<D>(q, a.q + t * a.q_stride + hk * D, a.q_stride, length, tid);
      load_tile_async<D>(q + kWide, a.k + t * a.k_stride + hk * D, a.k_stride, length, tid);
      cp_async_arrive(pair_full + b * 8);
      for (int n = 0; n < heads; ++n, ++head) {
        int h = hk * heads + n;
        auto next = [&]() {
          u32 slot = tile % kRing;
          if (tile >= kRing) mbar_wait(empty + slot * 8, (tile / kRing - 1) & 1);
          return slot;
        };
        auto loaded = [&](u32 slot) {
          cp_async_arrive(full + slot * 8);
          ++tile;
        };
        u32 slot = next();
        load_tile_async<D>(base + slot * kWide, a.u + (t * a.v_heads + h) * D,
                           int64_t{a.v_heads} * D, length, tid);
        if (kSets == 1 && head > 0)  // the only set: the previous head must be over
          mbar_wait(empty + (tile - 1) % kRing * 8, ((tile - 1) / kRing) & 1);
        if (tid < 64) scale_row.store(scales[head % kSets], tid);
        loaded(slot);
        fetch_scales(n + 1 < heads ? item : after, n + 1 < heads ? n + 1 : 0);
        slot = next();
        load_tile_async<D>(base + slot * kWide, a.d_o + t * a.do_stride + h * D, a.do_stride,
                           length, tid);
        loaded(slot);
        slot = next();
        load_tile_async<D>(base + slot * kWide, a.dv + t * a.dv_stride + h * D, a.dv_stride, length,
                           tid);
        loaded(slot);
        for (int p = 0; p < kParts; ++p) {
          int64_t image = ((int64_t{chunk} * a.v_heads + h) * kParts + p) * 64 * D;
          slot = next();
          load_image_async<kWide>(base + slot * kWide, a.states + image, tid);
          loaded(slot);
          slot = next();
          load_image_async<kWide>(base + slot * kWide, a.d_states + image, tid);
          loaded(slot);
        }
      }
    }
    cp_async_wait<0>();
    return;
  }

  if constexpr (M::kHopper) set_max_registers_up<224>();
  int row = warp * 16 + (lane >> 2);
  auto wait_tile = [&](int i) {
    int n = tile + i;
    mbar_wait(full + n % kRing * 8, (n / kRing) & 1);
    return base + n % kRing * kWide;
  };
  auto release = [&](int i) { mbar_arrive(empty + (tile + i) % kRing * 8); };
  u32 dp = base + Smem::kProducts, dd = dp + 8192;
  float total[NB][4], acc[NB][4];
  u32 f[4][4];

  for (int item = blockIdx.x; item < items; item += gridDim.x, ++pair) {
    int chunk = item / a.k_heads, hk = item % a.k_heads, b = pair % kPairs;
    ChunkInfo info = a.chunks[chunk];
    u32 q = base + Smem::kPair + b * 2 * kWide, k = q + kWide;
    const float* rms = (group == 0 ? a.q_rms : a.k_rms) + (int64_t{chunk} * a.k_heads + hk) * 64;
    float2 r_rows = {0.f, 0.f};  // 1 / norm^2
    if (a.normalize) r_rows = {rms[row] * rms[row], rms[row + 8] * rms[row + 8]};
    asm volatile("" : "+f"(r_rows.x), "+f"(r_rows.y));  // read here, not after the last product
    mbar_wait(pair_full + b * 8, (pair / kPairs) & 1);
    zero(total);
    float2 projection = {0.f, 0.f};
    for (int n = 0; n < heads; ++n, ++head, tile += kTiles) {
      int64_t token_head = int64_t{info.token} * a.v_heads + hk * heads + n;
      const Scales& sc = scales[head % kSets];
      u32 u = wait_tile(0);
      float x[8][4];
      if (group == 0) {
        u32 d_o = wait_tile(1);
        fence_async_proxy();
        M::fence();
        M::template ss<D / 16, false, false>(x, d_o, u, false);
        M::commit();
        M::template wait<0>();
        pin(x);
        release(0);
        score_fragments<false>(f, x, sc, warp, lane);
        if (head > 0) mbar_wait(product_empty, (head - 1) & 1);
#pragma unroll
        for (int m = 0; m < 4; ++m) store_fragment(dp, 64, warp * 16, m * 16, lane, f[m]);
        fence_async_proxy();
        mbar_arrive(product_ready);
        wait_tile(2);  // dv is the other group's, but a slot is released only once it was filled
        release(2);
        for (int p = 0; p < kParts; ++p) {
          u32 h = wait_tile(3 + 2 * p);
          fence_async_proxy();
          M::fence();
          M::template ss<4, false, true>(acc, d_o + p * kBlockBytes, h, p > 0);
          M::commit();
        }
        M::template wait<0>();
        pin(acc);
        release(1);
        scale_rows(acc, sc.read_q[row], sc.read_q[row + 8]);
        pin(acc);
        M::fence();
        M::template rs<true>(acc, f, k, true);
        M::commit();
        float inner = 0.f, carry = sc.carry;
        for (int p = 0; p < kParts; ++p) {
          u32 h = wait_tile(3 + 2 * p), ds = wait_tile(4 + 2 * p);
          inner += tile_dot<kWide>(h, ds, tid);
          release(3 + 2 * p);
          release(4 + 2 * p);
        }
#pragma unroll
        for (int d = 1; d < 32; d *= 2) inner += __shfl_xor_sync(~0u, inner, d);
        if (lane == 0) sums[(head & 1) * 4 + warp] = inner * carry;
        M::template wait<0>();
        pin(acc);
        pin(f);
        float2 r = row_dots(acc, q, row, lane);
        if ((lane & 3) == 0) {
          rows[(head & 1) * 64 + row] = r.x;
          rows[(head & 1) * 64 + row + 8] = r.y;
        }
        mbar_arrive(rows_ready + (head & 1) * 8);
        projection.x += r.x;
        projection.y += r.y;
        add(total, acc);
      } else {
        float2 beta = row_betas(a, token_head, info.length, row, lane);
        u32 dv = wait_tile(2);
        fence_async_proxy();
        M::fence();
        M::template ss<D / 16, false, false>(x, dv, u, false);
        M::commit();
        M::template wait<0>();
        pin(x);
        wait_tile(1);  // dO is the other group's
        release(1);
        read_write_fragments(f, x, sc, row, lane);
        store_beta_gradients(a, x, beta, token_head, info.length, row, lane);
#pragma unroll
        for (int m = 0; m < 4; ++m) store_fragment(dd, 64, warp * 16, m * 16, lane, f[m]);
        fence_async_proxy();
        group_sync();
        for (int p = 0; p < kParts; ++p) {
          u32 h = wait_tile(3 + 2 * p);
          fence_async_proxy();
          M::fence();
          M::template ss<4, false, true>(acc, dv + p * kBlockBytes, h, p > 0);
          M::commit();
        }
        M::template wait<0>();
        pin(acc);
        release(2);
        for (int p = 0; p < kParts; ++p) release(3 + 2 * p);
        scale_rows(acc, -sc.read_k[row], -sc.read_k[row + 8]);
        pin(acc);
        M::fence();
        M::template rs<true>(acc, f, k, true);
        M::commit();
        M::template wait<0>();
        pin(acc);
        pin(f);
        float2 read = row_dots(acc, k, row, lane);
        add(total, acc);
        for (int p = 0; p < kParts; ++p) {
          u32 ds = wait_tile(4 + 2 * p);
          fence_async_proxy();
          M::fence();
          M::template ss<4, false, true>(acc, u + p * kBlockBytes, ds, p > 0);
          M::commit();
        }
        M::template wait<0>();
        pin(acc);
        scale_rows(acc, sc.write[row], sc.write[row + 8]);
        release(0);
        for (int p = 0; p < kParts; ++p) release(4 + 2 * p);
        float2 tail = row_dots(acc, k, row, lane);
        mbar_wait(product_ready, head & 1);
        pin(acc);
        M::fence();
        M::template ss<4, true, true>(acc, dp, q, true);
        M::template ss<4, true, true>(acc, dd, k, true);
        M::commit();
        M::template wait<0>();
        pin(acc);
        mbar_arrive(product_empty);
        float2 write = row_dots(acc, k, row, lane);
        add(total, acc);
        projection.x += read.x + write.x;
        projection.y += read.y + write.y;
        if ((lane & 3) == 0) {
          rows[128 + row] = read.x - write.x;
          rows[128 + row + 8] = read.y - write.y;
        }
        float last = tail.x + tail.y;  // the 4 lanes of a row hold the same value
#pragma unroll
        for (int d = 4; d < 32; d *= 2) last += __shfl_xor_sync(~0u, last, d);
        if (lane == 0) sums[8 + warp] = last;
        group_sync();
        mbar_wait(rows_ready + (head & 1) * 8, (head >> 1) & 1);
        if (warp == 0)
          store_decay_gradients(a, rows + (head & 1) * 64, rows + 128, sums + (head & 1) * 4,
                                sums + 8, token_head, info.length, lane);
        group_sync();
      }
    }
    // Group 1 has passed rows_ready, so group 0 no longer reads K; group 0 waits for group 1's Q.
    u32 x = group == 0 ? q : k;
    if (group == 0) mbar_wait(product_empty, (head - 1) & 1);
    float2 factor = {r_rows.x * projection.x, r_rows.y * projection.y};
    finish_rows(x, total, factor, row, lane);
    group_sync();
    if (group == 0)
      store_tile<D>(a.dq + info.token * a.dq_stride + hk * D, x, a.dq_stride, info.length, tid);
    else
      store_tile<D>(a.dk + info.token * a.dk_stride + hk * D, x, a.dk_stride, info.length, tid);
    mbar_arrive(pair_empty + b * 8);
  }
}

template <class M, int D>
void launch(const Args& a, cudaStream_t stream) {
  constexpr u32 bytes = GradientSmem<M, D>::kBytes;
  cudaFuncSetAttribute(gradients_kernel<M, D>, cudaFuncAttributeMaxDynamicSharedMemorySize, bytes);
  int device = 0, sms = 0;
  cudaGetDevice(&device);
  cudaDeviceGetAttribute(&sms, cudaDevAttrMultiProcessorCount, device);
  gradients_kernel<M, D><<<sms, 384, bytes, stream>>>(a);
  check_launch("gated_delta_net gradients");
}

}  // namespace

static_assert(GradientSmem<MmaPortable, 128>::kBytes <= 163 * 1024, "what sm_80 has");

size_t gradients_shared_bytes(int head_dim, bool hopper) {
  if (head_dim == 256) return wide_gradients_shared_bytes();
  if (head_dim == 64)
    return hopper ? GradientSmem<MmaHopper, 64>::kBytes : GradientSmem<MmaPortable, 64>::kBytes;
  return hopper ? GradientSmem<MmaHopper, 128>::kBytes : GradientSmem<MmaPortable, 128>::kBytes;
}

void launch_gradients(const Args& a, int head_dim, bool hopper, cudaStream_t s) {
  if (head_dim == 256) return launch_wide_gradients(a, s);
  if (head_dim == 128)
    hopper ? launch<MmaHopper, 128>(a, s) : launch<MmaPortable, 128>(a, s);
  else
    hopper ? launch<MmaHopper, 64>(a, s) : launch<MmaPortable, 64>(a, s);
}

}  // namespace heddle::ops::cuda::gdn
