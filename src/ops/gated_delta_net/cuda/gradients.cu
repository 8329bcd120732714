// Third pass of the backward, parallel over chunks: dq, dk, dg, dbeta.
#include "serial.cuh"

namespace heddle::ops::cuda::gdn {
namespace {

template <class M, int D>
struct GradientSmem {
  static constexpr int kParts = D / 64;
  static constexpr int kTiles = 3 + 2 * kParts;  // per value head: U, dO, dv, then h and dS by part
  // U is held until the last tile of its head, so the ring cannot be shorter than kTiles.
  static constexpr int kRing = M::kHopper ? 8 : kTiles;
  static constexpr int kPairs = M::kHopper ? 2 : 1;      // Q, K buffers
  static constexpr int kScaleSets = M::kHopper ? 3 : 1;
  static constexpr u32 kWide = 64 * D * 2;
  static constexpr u32 kPair = kRing * kWide;
  static constexpr u32 kProducts = kPair + kPairs * 2 * kWide;  // dP, D
  static constexpr u32 kScales = kProducts + 2 * 8192;
  static constexpr u32 kRows = kScales + kScaleSets * sizeof(Scales);
  static constexpr u32 kBarriers = kRows + (8 * 64 + 32 + 4 * 64) * 4;
  static constexpr u32 kBytes = kBarriers + 256;
};

/// Dot products of the accumulator's two rows of this thread with the same rows of a tile; every lane of
/// a row gets the sum.
template <int NB>
__device__ __forceinline__ float2 row_dots(const float (&acc)[NB][4], u32 tile, int row, int lane) {
  float2 s = {0.f, 0.f};
#pragma unroll
  for (int n = 0; n < NB; ++n) {
    u32 x = ld_shared4(tile_address(tile, 64, row, n * 8) + (lane & 3) * 4);
    u32 y = ld_shared4(tile_address(tile, 64, row + 8, n * 8) + (lane & 3) * 4);
    s.x += acc[n][0] * bf16_lo(x) + acc[n][1] * bf16_hi(x);
    s.y += acc[n][2] * bf16_lo(y) + acc[n][3] * bf16_hi(y);
  }
#pragma unroll
  for (int d = 1; d < 4; d *= 2) {
    s.x += __shfl_xor_sync(~0u, s.x, d);
    s.y += __shfl_xor_sync(~0u, s.y, d);
  }
  return s;
}
template <int NB>
__device__ __forceinline__ void scale_rows(float (&acc)[NB][4], float lo, float hi) {
#pragma unroll
  for (int n = 0; n < NB; ++n) {
    acc[n][0] *= lo;
    acc[n][1] *= lo;
    acc[n][2] *= hi;
    acc[n][3] *= hi;
  }
}
template <int NB>
__device__ __forceinline__ void add(float (&acc)[NB][4], const float (&x)[NB][4]) {
#pragma unroll
  for (int n = 0; n < NB; ++n)
#pragma unroll
    for (int e = 0; e < 4; ++e) acc[n][e] += x[n][e];
}

/// Replaces a tile by total - tile * r^2 * (tile . total) per row (gradient through y = r x), in place:
/// a thread reads and writes the same elements. r = 0 leaves total.
template <int NB>
__device__ __forceinline__ void finish_rows(u32 tile, const float (&total)[NB][4], float2 factor,
                                            int row, int lane) {
#pragma unroll
  for (int n = 0; n < NB; ++n)
#pragma unroll
    for (int e = 0; e < 2; ++e) {
      u32 p = tile_address(tile, 64, row + e * 8, n * 8) + (lane & 3) * 4, x = ld_shared4(p);
      float f = e ? factor.y : factor.x;
      st_shared4(p, pack_bf16(total[n][2 * e] - f * bf16_lo(x),
                              total[n][2 * e + 1] - f * bf16_hi(x)));
    }
}

/// -e^{G_i - G_j} x_ij / (|k_i| |k_j|) below the diagonal, as fragments; rows `row`, `row` + 8.
__device__ __forceinline__ void read_write_fragments(u32 (&f)[4][4], const float (&x)[8][4],
                                                     const Scales& s, int row, int lane) {
#pragma unroll
  for (int e = 0; e < 2; ++e) {
    int i = row + e * 8;
    float gi = s.g[i], ki = -s.k[i];
#pragma unroll
    for (int m = 0; m < 8; ++m) {
      int j = m * 8 + (lane & 3) * 2;
      float2 gj = *reinterpret_cast<const float2*>(s.g + j);
      float2 kj = *reinterpret_cast<const float2*>(s.k + j);
      float d0 = j < i ? x[m][2 * e] * (ki * kj.x) * exp2_fast(gi - gj.x) : 0.f;
      float d1 = j + 1 < i ? x[m][2 * e + 1] * (ki * kj.y) * exp2_fast(gi - gj.y) : 0.f;
      f[m >> 1][(m & 1) * 2 + e] = pack_bf16(d0, d1);
    }
  }
}

/// Sum of products of two 64 x D tiles with the same image, this thread's share.
template <int BYTES>
__device__ __forceinline__ float tile_dot(u32 x, u32 y, int tid) {
  float s = 0.f;
#pragma unroll
  for (int i = 0; i < BYTES / 2048; ++i) {
    uint4 a = ld_shared16(x + i * 2048 + tid * 16), b = ld_shared16(y + i * 2048 + tid * 16);
    s += bf16_lo(a.x) * bf16_lo(b.x) + bf16_hi(a.x) * bf16_hi(b.x);
    s += bf16_lo(a.y) * bf16_lo(b.y) + bf16_hi(a.y) * bf16_hi(b.y);
    s += bf16_lo(a.z) * bf16_lo(b.z) + bf16_hi(a.z) * bf16_hi(b.z);
    s += bf16_lo(a.w) * bf16_lo(b.w) + bf16_hi(a.w) * bf16_hi(b.w);
  }
  return s;
}

/// Persistent CTA over (chunk, key head); value heads of the group in turn, all tiles through one ring.
/// Four groups of 128 threads share the columns of K in halves; "half" below is one 64-column block. The
/// last group loads.
///   groups 0, 1: dP = mask(dO U^T) by group 0, D = -mask(dv U^T) by group 1 (its diagonal gives dbeta),
///                both to shared memory; dq half = (dO h^T) s e^G + dP K;  half of <dS, h>
///   groups 2, 3: dk_read half = -(dv h^T) e^G + D K;
///                dk_write half = (U dS^T) e^{G_C-G} + dP^T Q + D^T K
/// dg is the reverse cumulative sum of q.dq + k.dk_read - k.dk_write, with <dS, S_C> added at the last
/// row, S_C = e^{G_C} h + sum of writes. dP and D are rounded once and feed every product and, through
/// dq and dk, dg, so its cancellations are exact. For D = 64 there is one half.
///
/// Shared memory (D = 128): ring 8 x 16, Q and K 2 x 32, dP and D 16 = 208 KB, scales and rows 8 KB.
/// Barriers: full/empty[slot]; pair_full/pair_empty[buffer]; product_ready/product_empty for dP and D;
/// rows_ready[2] for the row sums of dg.
template <class M, int D>
__global__ void __launch_bounds__(640, 1) gradients_kernel(const __grid_constant__ Args a) {
  using Smem = GradientSmem<M, D>;
  constexpr int kHalf = 8, kParts = Smem::kParts, kTiles = Smem::kTiles, kRing = Smem::kRing,
                kPairs = Smem::kPairs, kSets = Smem::kScaleSets;
  constexpr u32 kWide = Smem::kWide;
  extern __shared__ __align__(1024) uint8_t smem[];
  u32 base = smem_u32(smem);
  Scales* scales = reinterpret_cast<Scales*>(smem + Smem::kScales);
  float* rows = reinterpret_cast<float*>(smem + Smem::kRows);  // [2][4][64] terms of dG by group
  float* ends = rows + 512;                                    // [2][16] terms of dG_C by warp
  float* projections = ends + 32;                              // [4][64] x . dx of q or k by group
  u32 full = base + Smem::kBarriers, empty = full + 64, pair_full = full + 128,
      pair_empty = full + 144, product_ready = full + 160, product_empty = full + 168,
      rows_ready = full + 176;
  int group = threadIdx.x >> 7, tid = threadIdx.x & 127, lane = tid & 31, warp = tid >> 5;
  if (threadIdx.x == 0) {
    for (int i = 0; i < 8; ++i) {
      mbar_init(full + i * 8, kLoaders<M>);
      mbar_init(empty + i * 8, 512);
    }
    for (int i = 0; i < 2; ++i) {
      mbar_init(pair_full + i * 8, 2 * kLoaders<M>);
      mbar_init(pair_empty + i * 8, 512);
      mbar_init(rows_ready + i * 8, 512);
    }
    mbar_init(product_ready, 256);
    mbar_init(product_empty, 512);
  }
  __syncthreads();
  int items = a.first_chunk[a.sequences] * a.k_heads, heads = a.v_heads / a.k_heads;
  int tile = 0, head = 0, pair = 0;  // running counts, the same in every group

  if (group == 4) {
    // 4 x 112 + 32 registers is all that 640 threads of 96 own.
    if constexpr (M::kHopper) set_max_registers_down<32>();
    constexpr int L = kLoaders<M>;
    if (tid >= L) return;
    // Table entries and scales are fetched one step ahead of their use.
    ChunkInfo info{};
    ScaleRows<L> scale_rows;
    auto fetch_scales = [&](int item, int n) {
      int hk = item % a.k_heads;
      if (item < items) scale_rows.load(a, item / a.k_heads, hk * heads + n, hk, tid);
    };
    if (blockIdx.x < items) info = a.chunks[blockIdx.x / a.k_heads];
    fetch_scales(blockIdx.x, 0);
    for (int item = blockIdx.x; item < items; item += gridDim.x, ++pair) {
      int chunk = item / a.k_heads, hk = item % a.k_heads, after = item + gridDim.x;
      int t = info.token, length = info.length;
      if (after < items) info = a.chunks[after / a.k_heads];
      // One tile of a token tensor, D columns from `column`.
      auto load_tile = [&](u32 dst, Map map, const bf16* src, int64_t stride, int column, u32 bar) {
        if (M::kHopper && length == kChunk) {
          if (tid > 0) return mbar_arrive(bar);
          fence_async_proxy();  // the buffer's last writer may have been cp.async
          mbar_expect(bar, kWide);
          for (int p = 0; p < kParts; ++p)
            bulk_load_box(dst + p * 8192, &a.maps[map], column + p * 64, t, bar);
        } else {
          load_tile_async<D, L>(dst, src + t * stride + column, stride, length, tid);
          cp_async_arrive(bar);
        }
      };
      auto load_image = [&](u32 dst, const bf16* src, u32 bar) {
        if (M::kHopper) {
          if (tid > 0) return mbar_arrive(bar);
          fence_async_proxy();
          mbar_expect(bar, kWide);
          bulk_load(dst, src, kWide, bar);
        } else {
          load_image_async<kWide, L>(dst, src, tid);
          cp_async_arrive(bar);
        }
      };
      auto next = [&]() {
        u32 slot = tile % kRing;
        if (tile >= kRing) mbar_wait(empty + slot * 8, (tile / kRing - 1) & 1);
        ++tile;
        return slot;
      };
      int b = pair % kPairs;
      if (pair >= kPairs) mbar_wait(pair_empty + b * 8, (pair / kPairs - 1) & 1);
      u32 q = base + Smem::kPair + b * 2 * kWide;
      load_tile(q, kMapQ, a.q, a.q_stride, hk * D, pair_full + b * 8);
      load_tile(q + kWide, kMapK, a.k, a.k_stride, hk * D, pair_full + b * 8);
      for (int n = 0; n < heads; ++n, ++head) {
        int h = hk * heads + n;
        u32 slot = next();
        if (kSets == 1 && head > 0)  // the only set of scales: the previous head must be over
          mbar_wait(empty + (tile - 2) % kRing * 8, ((tile - 2) / kRing) & 1);
        scale_rows.store(scales[head % kSets], tid);
        load_tile(base + slot * kWide, kMapU, a.u, int64_t{a.v_heads} * D, h * D, full + slot * 8);
        fetch_scales(n + 1 < heads ? item : after, n + 1 < heads ? n + 1 : 0);
        slot = next();
        load_tile(base + slot * kWide, kMapGradO, a.d_o, a.do_stride, h * D, full + slot * 8);
        slot = next();
        load_tile(base + slot * kWide, kMapGradV, a.dv, a.dv_stride, h * D, full + slot * 8);
        for (int p = 0; p < kParts; ++p) {
          int64_t image = ((int64_t{chunk} * a.v_heads + h) * kParts + p) * 64 * D;
          slot = next();
          load_image(base + slot * kWide, a.states + image, full + slot * 8);
          slot = next();
          load_image(base + slot * kWide, a.d_states + image, full + slot * 8);
        }
      }
    }
    cp_async_wait<0>();
    return;
  }

  if constexpr (M::kHopper) set_max_registers_up<112>();
  int row = warp * 16 + (lane >> 2), half = kParts == 2 ? group & 1 : 0;
  // With one half, the odd groups repeat the even groups' products and keep them to themselves.
  bool is_query = group < 2, has_half = kParts == 2 || (group & 1) == 0, on_diagonal = (lane & 3) == (lane >> 3);
  bool tail = true;  // of the current chunk: its tiles come by cp.async
  auto wait_tile = [&](int i) {
    int n = tile + i;
    wait_filled(full + n % kRing * 8, (n / kRing) & 1, tail);
    return base + n % kRing * kWide;
  };
  auto release = [&](int i) { mbar_arrive(empty + (tile + i) % kRing * 8); };
  u32 products = base + Smem::kProducts, dp = products, dd = products + 8192;
  float total[kHalf][4], acc[kHalf][4];

  for (int item = blockIdx.x; item < items; item += gridDim.x, ++pair) {
    int chunk = item / a.k_heads, hk = item % a.k_heads, b = pair % kPairs;
    ChunkInfo info = a.chunks[chunk];
    tail = !M::kHopper || info.length < kChunk;
    u32 q_pair = base + Smem::kPair + b * 2 * kWide;
    u32 q = q_pair + half * kBlockBytes, k = q + kWide;  // this group's half of the tiles
    const float* rms = (is_query ? a.q_rms : a.k_rms) + (int64_t{chunk} * a.k_heads + hk) * 64;
    float2 r_rows = {rms[row], rms[row + 8]};
    wait_filled(pair_full + b * 8, (pair / kPairs) & 1, tail);
    zero(total);
    float2 projection = {0.f, 0.f};
    for (int n = 0; n < heads; ++n, ++head, tile += kTiles) {
      const Scales& sc = scales[head % kSets];
      float2 term = {0.f, 0.f};  // this group's share of dG for the thread's two rows
      float end = 0.f;           // and of dG_C
      if (is_query) {
        int64_t token_head = int64_t{info.token} * a.v_heads + hk * heads + n;
        float beta[2] = {0.f, 0.f};
        if (group == 1 && on_diagonal) {
          if (row < info.length) beta[0] = a.beta[token_head + int64_t{row} * a.v_heads];
          if (row + 8 < info.length) beta[1] = a.beta[token_head + int64_t{row + 8} * a.v_heads];
        }
        u32 u = wait_tile(0), d_o = wait_tile(1), dv = wait_tile(2);
        float x[8][4];
        u32 f[4][4];
        M::fence();
        M::template ss<D / 16, false, false>(x, group == 0 ? d_o : dv, u, false);
        M::commit();
        M::template wait<0>();
        pin(x);
        release(0);
        release(2);
        if (group == 0) {
          score_fragments<false>(f, x, sc, warp, lane);
        } else {
          float diagonal[2] = {0.f, 0.f};
#pragma unroll
          for (int m = 0; m < 8; ++m)
#pragma unroll
            for (int e = 0; e < 2; ++e) {
              int j = m * 8 + (lane & 3) * 2 - e * 8;
              diagonal[e] += j == row ? x[m][2 * e] : j + 1 == row ? x[m][2 * e + 1] : 0.f;
            }
          read_write_fragments(f, x, sc, row, lane);
          if (on_diagonal) {  // u and dv both carry one factor beta
            if (row < info.length)
              a.dbeta[token_head + int64_t{row} * a.v_heads] =
                  fabsf(beta[0]) < 1e-18f ? 0.f : diagonal[0] / beta[0] / beta[0];
            if (row + 8 < info.length)
              a.dbeta[token_head + int64_t{row + 8} * a.v_heads] =
                  fabsf(beta[1]) < 1e-18f ? 0.f : diagonal[1] / beta[1] / beta[1];
          }
        }
        if (head > 0) mbar_wait(product_empty, (head - 1) & 1);
#pragma unroll
        for (int m = 0; m < 4; ++m)
          store_fragment(products + group * 8192, 64, warp * 16, m * 16, lane, f[m]);
        fence_async_proxy();
        mbar_arrive(product_ready);
        for (int p = 0; p < kParts; ++p) {
          u32 h = wait_tile(3 + 2 * p);
          M::fence();
          M::template ss<4, false, true>(acc, d_o + p * kBlockBytes, h + half * kBlockBytes,
                                         p > 0);
          M::commit();
        }
        for (int p = 0; p < kParts; ++p) {
          u32 h = wait_tile(3 + 2 * p), ds = wait_tile(4 + 2 * p);
          if (has_half && p == half) end = tile_dot<kWide>(h, ds, tid) * sc.carry;
        }
        M::template wait<0>();
        pin(acc);
        release(1);
        for (int p = 0; p < kParts; ++p) {
          release(3 + 2 * p);
          release(4 + 2 * p);
        }
        scale_rows(acc, sc.read_q[row], sc.read_q[row + 8]);
        mbar_wait(product_ready, head & 1);
        pin(acc);
        M::fence();
        M::template ss<4, false, true>(acc, dp, k, true);
        M::commit();
        M::template wait<0>();
        pin(acc);
        mbar_arrive(product_empty);
        if (has_half) {
          term = row_dots(acc, q, row, lane);
          add(total, acc);
        }
        projection.x += term.x;
        projection.y += term.y;
#pragma unroll
        for (int d = 1; d < 32; d *= 2) end += __shfl_xor_sync(~0u, end, d);
      } else {
        u32 u = wait_tile(0), dv = wait_tile(2);
        wait_tile(1);  // dO is not for these groups, but a slot is released only once it was filled
        release(1);
        for (int p = 0; p < kParts; ++p) {
          u32 h = wait_tile(3 + 2 * p);
          M::fence();
          M::template ss<4, false, true>(acc, dv + p * kBlockBytes, h + half * kBlockBytes,
                                         p > 0);
          M::commit();
        }
        M::template wait<0>();
        pin(acc);
        release(2);
        for (int p = 0; p < kParts; ++p) release(3 + 2 * p);
        scale_rows(acc, -sc.read_k[row], -sc.read_k[row + 8]);
        mbar_wait(product_ready, head & 1);
        pin(acc);
        M::fence();
        M::template ss<4, false, true>(acc, dd, k, true);
        M::commit();
        M::template wait<0>();
        pin(acc);
        if (has_half) {
          term = row_dots(acc, k, row, lane);
          add(total, acc);
        }
        projection.x += term.x;
        projection.y += term.y;
        for (int p = 0; p < kParts; ++p) {
          u32 ds = wait_tile(4 + 2 * p);
          M::fence();
          M::template ss<4, false, true>(acc, u + p * kBlockBytes, ds + half * kBlockBytes,
                                         p > 0);
          M::commit();
        }
        M::template wait<0>();
        pin(acc);
        scale_rows(acc, sc.write[row], sc.write[row + 8]);
        release(0);
        for (int p = 0; p < kParts; ++p) release(4 + 2 * p);
        float2 tail = {0.f, 0.f};
        if (has_half) tail = row_dots(acc, k, row, lane);
        pin(acc);
        M::fence();
        M::template ss<4, true, true>(acc, dp, q, true);
        M::template ss<4, true, true>(acc, dd, k, true);
        M::commit();
        M::template wait<0>();
        pin(acc);
        mbar_arrive(product_empty);
        if (has_half) {
          float2 write = row_dots(acc, k, row, lane);
          projection.x += write.x;
          projection.y += write.y;
          term.x -= write.x;
          term.y -= write.y;
          add(total, acc);
        }
        end = tail.x + tail.y;  // the 4 lanes of a row hold the same value
#pragma unroll
        for (int d = 4; d < 32; d *= 2) end += __shfl_xor_sync(~0u, end, d);
      }
      float* terms = rows + (head & 1) * 256;
      if ((lane & 3) == 0) {
        terms[group * 64 + row] = term.x;
        terms[group * 64 + row + 8] = term.y;
      }
      if (lane == 0) ends[(head & 1) * 16 + group * 4 + warp] = end;
      mbar_arrive(rows_ready + (head & 1) * 8);
      if (group == 0 && warp == 0) {
        // Lane l owns rows 63 - 2 l and 62 - 2 l, so that an inclusive scan runs backwards.
        mbar_wait(rows_ready + (head & 1) * 8, (head >> 1) & 1);
        int i = 63 - 2 * lane;
        float hi = 0.f, lo = 0.f;
#pragma unroll
        for (int g = 0; g < 4; ++g) {
          hi += terms[g * 64 + i];
          lo += terms[g * 64 + i - 1];
        }
        if (lane == 0)
          for (int m = 0; m < 16; ++m) hi += ends[(head & 1) * 16 + m];
        float s = hi + lo;
#pragma unroll
        for (int d = 1; d < 32; d *= 2) {
          float y = __shfl_up_sync(~0u, s, d);
          if (lane >= d) s += y;
        }
        int64_t first = int64_t{info.token} * a.v_heads + hk * heads + n;
        if (i < info.length) a.dg[first + int64_t{i} * a.v_heads] = s - lo;
        if (i - 1 < info.length) a.dg[first + int64_t{i - 1} * a.v_heads] = s;
      }
    }
    if ((lane & 3) == 0) {
      projections[group * 64 + row] = projection.x;
      projections[group * 64 + row + 8] = projection.y;
    }
    named_sync(7, 512);  // Q and K are no longer read as operands; every group's share is there
    const float* other = projections + (group ^ 1) * 64;
    float2 factor = {0.f, 0.f};
    if (a.normalize)
      factor = {r_rows.x * r_rows.x * (projection.x + other[row]),
                r_rows.y * r_rows.y * (projection.y + other[row + 8])};
    if (has_half) {
      u32 x = is_query ? q : k;
      finish_rows(x, total, factor, row, lane);
      group_sync();
      if (is_query)
        store_tile<64>(a.dq + info.token * a.dq_stride + hk * D + half * 64, x, a.dq_stride,
                       info.length, tid);
      else
        store_tile<64>(a.dk + info.token * a.dk_stride + hk * D + half * 64, x, a.dk_stride,
                       info.length, tid);
    }
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
  gradients_kernel<M, D><<<sms, 640, bytes, stream>>>(a);
  check_launch("gated_delta_net gradients");
}

}  // namespace

void launch_gradients(const Args& a, int head_dim, bool hopper, cudaStream_t s) {
  if (head_dim == 128)
    hopper ? launch<MmaHopper, 128>(a, s) : launch<MmaPortable, 128>(a, s);
  else
    hopper ? launch<MmaHopper, 64>(a, s) : launch<MmaPortable, 64>(a, s);
}

}  // namespace heddle::ops::cuda::gdn
