// Last launch of the backward at head dimension 256. There the tiles of one value head take 352 KB
// and dq's accumulators all registers of gradients.cu, so here the states come in quarters: 64 rows
// of V and half of K's columns at a time.
#include "gradients.cuh"

namespace heddle::ops::cuda::gdn {
namespace {

constexpr int kDim = 256, kParts = kDim / 64, kHalves = 2;

struct WideSmem {
  static constexpr u32 kWide = 64 * kDim * 2, kQuarter = kWide / kHalves;
  static constexpr u32 kKey = kWide;                       // after Q
  static constexpr u32 kWritten = 2 * kWide;               // U, dO, dv: 64 columns of V of each
  static constexpr u32 kState = kWritten + 3 * 8192;       // h, dS: a quarter of a part's image
  static constexpr u32 kProducts = kState + 2 * kQuarter;  // dP, D
  static constexpr u32 kScales = kProducts + 2 * 8192;
  static constexpr u32 kRows = kScales + sizeof(Scales);  // 2 x 64, then 2 x 4 sums
  static constexpr u32 kBytes = kRows + (2 * 64 + 2 * 4) * 4;
};
static_assert(WideSmem::kBytes <= 163 * 1024, "what sm_80 has");

/// Persistent CTA over (chunk, key head), value heads of the group in turn. What is computed, and
/// in which group, is as in gradients_kernel; U, dO and dv are loaded anew for each half of K. A
/// load is waited for by all, without a ring: this head dimension is for correctness before speed.
///
/// Shared memory: Q and K 2 x 32, U, dO, dv 3 x 8, h and dS 2 x 16, dP and D 16 = 136 KB, scales
/// and rows 2 KB. Registers: a half's accumulators; of `total` the other half spills.
template <class M>
__global__ void __launch_bounds__(256, 1) wide_gradients_kernel(const __grid_constant__ Args a) {
  using Smem = WideSmem;
  constexpr int NB = kDim / kHalves / 8;
  extern __shared__ __align__(1024) uint8_t smem[];
  u32 base = smem_u32(smem);
  u32 q = base, k = base + Smem::kKey, u = base + Smem::kWritten, d_o = u + 8192, dv = d_o + 8192,
      state = base + Smem::kState, d_state = state + Smem::kQuarter, dp = base + Smem::kProducts,
      dd = dp + 8192;
  Scales& sc = *reinterpret_cast<Scales*>(smem + Smem::kScales);
  float* rows = reinterpret_cast<float*>(smem + Smem::kRows);  // [2][64] by group
  float* sums = rows + 128;  // [2][4] by group and warp: <dS, h>, and what the chunk adds to it
  int group = threadIdx.x >> 7, tid = threadIdx.x & 127, lane = tid & 31, warp = tid >> 5;
  int row = warp * 16 + (lane >> 2);
  int items = a.first_chunk[a.sequences] * a.k_heads, heads = a.v_heads / a.k_heads;
  for (int item = blockIdx.x; item < items; item += gridDim.x) {
    int chunk = item / a.k_heads, hk = item % a.k_heads;
    ChunkInfo info = a.chunks[chunk];
    int64_t t = info.token;
    u32 own = group == 0 ? q : k;
    __syncthreads();  // the item before has been stored
    if (group == 0)
      load_tile_async<kDim>(q, a.q + t * a.q_stride + hk * kDim, a.q_stride, info.length, tid);
    else
      load_tile_async<kDim>(k, a.k + t * a.k_stride + hk * kDim, a.k_stride, info.length, tid);
    float total[kHalves][NB][4];
#pragma unroll
    for (int half = 0; half < kHalves; ++half) zero(total[half]);
    float2 projection = {0.f, 0.f};

    for (int n = 0; n < heads; ++n) {
      int h = hk * heads + n;
      int64_t token_head = t * a.v_heads + h;
      if (group == 0 && tid < 64) {
        ScaleLoad<true, false> scale_row;
        scale_row.load(a, chunk, h, hk, tid);
        scale_row.store(sc, tid);
      }
      float2 beta = {0.f, 0.f};
      if (group == 1) beta = row_betas(a, token_head, info.length, row, lane);
      u32 f[4][4];
      float2 read = {0.f, 0.f}, write = {0.f, 0.f};
      float sum = 0.f;
#pragma unroll
      for (int half = 0; half < kHalves; ++half) {
        float x[8][4], acc[NB][4], written[NB][4];
        u32 q_half = q + half * Smem::kQuarter, k_half = k + half * Smem::kQuarter;
        for (int p = 0; p < kParts; ++p) {
          int64_t image = ((int64_t{chunk} * a.v_heads + h) * kParts + p) * 64 * kDim +
                          half * (Smem::kQuarter / 2);
          __syncthreads();  // what was loaded before has been read
          if (group == 0) {
            load_tile_async<64>(d_o, a.d_o + t * a.do_stride + h * kDim + p * 64, a.do_stride,
                                info.length, tid);
            load_image_async<Smem::kQuarter>(state, a.states + image, tid);
          } else {
            load_tile_async<64>(u, a.u + token_head * kDim + p * 64, int64_t{a.v_heads} * kDim,
                                info.length, tid);
            load_tile_async<64>(dv, a.dv + t * a.dv_stride + h * kDim + p * 64, a.dv_stride,
                                info.length, tid);
            load_image_async<Smem::kQuarter>(d_state, a.d_states + image, tid);
          }
          cp_async_commit();
          cp_async_wait<0>();
          __syncthreads();
          if (group == 0) {
            if (half == 0) M::template ss<4, false, false>(x, d_o, u, p > 0);
            M::template ss<4, false, true>(acc, d_o, state, p > 0);
            sum += tile_dot<Smem::kQuarter>(state, d_state, tid);
          } else {
            if (half == 0) M::template ss<4, false, false>(x, dv, u, p > 0);
            M::template ss<4, false, true>(acc, dv, state, p > 0);
            M::template ss<4, false, true>(written, u, d_state, p > 0);
          }
        }
        if (half == 0) {
          if (group == 0) {
            score_fragments<false>(f, x, sc, warp, lane);
          } else {
            read_write_fragments(f, x, sc, row, lane);
            store_beta_gradients(a, x, beta, token_head, info.length, row, lane);
          }
#pragma unroll
          for (int m = 0; m < 4; ++m)
            store_fragment(group == 0 ? dp : dd, 64, warp * 16, m * 16, lane, f[m]);
          __syncthreads();
        }
        const float* reads = group == 0 ? sc.read_q : sc.read_k;
        float sign = group == 0 ? 1.f : -1.f;
        scale_rows(acc, sign * reads[row], sign * reads[row + 8]);
        M::template rs<true>(acc, f, k_half, true);
        float2 dots = row_dots(acc, group == 0 ? q_half : k_half, row, lane);
        read.x += dots.x;
        read.y += dots.y;
        add(total[half], acc);
        if (group == 0) continue;
        scale_rows(written, sc.write[row], sc.write[row + 8]);
        dots = row_dots(written, k_half, row, lane);
        if ((lane & 3) == 0) sum += dots.x + dots.y;  // the 4 lanes of a row hold the same value
        M::template ss<4, true, true>(written, dp, q_half, true);
        M::template ss<4, true, true>(written, dd, k_half, true);
        dots = row_dots(written, k_half, row, lane);
        write.x += dots.x;
        write.y += dots.y;
        add(total[half], written);
      }
      if (group == 0) sum *= sc.carry;
#pragma unroll
      for (int d = 1; d < 32; d *= 2) sum += __shfl_xor_sync(~0u, sum, d);
      if (lane == 0) sums[group * 4 + warp] = sum;
      if ((lane & 3) == 0) {
        rows[group * 64 + row] = read.x - write.x;
        rows[group * 64 + row + 8] = read.y - write.y;
      }
      projection.x += read.x + write.x;
      projection.y += read.y + write.y;
      __syncthreads();
      if (group == 1 && warp == 0)
        store_decay_gradients(a, rows, rows + 64, sums, sums + 4, token_head, info.length, lane);
    }
    float2 factor = {0.f, 0.f};
    if (a.normalize) {
      const float* rms = (group == 0 ? a.q_rms : a.k_rms) + (int64_t{chunk} * a.k_heads + hk) * 64;
      factor = {rms[row] * rms[row] * projection.x, rms[row + 8] * rms[row + 8] * projection.y};
    }
#pragma unroll
    for (int half = 0; half < kHalves; ++half)
      finish_rows(own + half * Smem::kQuarter, total[half], factor, row, lane);
    group_sync();
    if (group == 0)
      store_tile<kDim>(a.dq + t * a.dq_stride + hk * kDim, q, a.dq_stride, info.length, tid);
    else
      store_tile<kDim>(a.dk + t * a.dk_stride + hk * kDim, k, a.dk_stride, info.length, tid);
  }
}

}  // namespace

size_t wide_gradients_shared_bytes() { return WideSmem::kBytes; }

void launch_wide_gradients(const Args& a, cudaStream_t stream) {
  auto kernel = wide_gradients_kernel<MmaPortable>;
  cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, WideSmem::kBytes);
  int device = 0, sms = 0;
  cudaGetDevice(&device);
  cudaDeviceGetAttribute(&sms, cudaDevAttrMultiProcessorCount, device);
  kernel<<<sms, 256, WideSmem::kBytes, stream>>>(a);
  check_launch("gated_delta_net gradients");
}

}  // namespace heddle::ops::cuda::gdn
