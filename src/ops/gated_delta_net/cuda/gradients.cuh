// Shared by the kernels of the last launch of the backward: steps on a group's accumulators, whose
// rows are tokens.
#pragma once

#include "serial.cuh"

namespace heddle::ops::cuda::gdn {

/// Dot products of the accumulator's two rows of this thread with the same rows of a tile; every
/// lane of a row gets the sum.
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

/// Replaces a tile by total - tile * r^2 * (tile . total) per row (gradient through y = r x), in
/// place: a thread reads and writes the same elements. r = 0 leaves total.
template <int NB>
__device__ __forceinline__ void finish_rows(u32 tile, const float (&total)[NB][4], float2 factor,
                                            int row, int lane) {
#pragma unroll
  for (int n = 0; n < NB; ++n)
#pragma unroll
    for (int e = 0; e < 2; ++e) {
      u32 p = tile_address(tile, 64, row + e * 8, n * 8) + (lane & 3) * 4, x = ld_shared4(p);
      float f = e ? factor.y : factor.x;
      st_shared4(p,
                 pack_bf16(total[n][2 * e] - f * bf16_lo(x), total[n][2 * e + 1] - f * bf16_hi(x)));
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

/// Writes dbeta of the rows row and row + 8 that lie within the chunk, from x = dv U^T: u and dv
/// both carry one factor beta, which row_betas read. token_head: of the chunk's first token.
__device__ __forceinline__ bool holds_diagonal(int lane) { return (lane & 3) == (lane >> 3); }
__device__ __forceinline__ float2 row_betas(const Args& a, int64_t token_head, int length, int row,
                                            int lane) {
  float2 beta = {0.f, 0.f};
  if (holds_diagonal(lane)) {
    if (row < length) beta.x = a.beta[token_head + int64_t{row} * a.v_heads];
    if (row + 8 < length) beta.y = a.beta[token_head + int64_t{row + 8} * a.v_heads];
  }
  return beta;
}
__device__ __forceinline__ void store_beta_gradients(const Args& a, const float (&x)[8][4],
                                                     float2 beta, int64_t token_head, int length,
                                                     int row, int lane) {
  float diagonal[2] = {0.f, 0.f};
#pragma unroll
  for (int m = 0; m < 8; ++m)
#pragma unroll
    for (int e = 0; e < 2; ++e) {
      int j = m * 8 + (lane & 3) * 2 - e * 8;
      diagonal[e] += j == row ? x[m][2 * e] : j + 1 == row ? x[m][2 * e + 1] : 0.f;
    }
  if (!holds_diagonal(lane)) return;
  if (row < length)
    a.dbeta[token_head + int64_t{row} * a.v_heads] =
        fabsf(beta.x) < 1e-18f ? 0.f : diagonal[0] / beta.x / beta.x;
  if (row + 8 < length)
    a.dbeta[token_head + int64_t{row + 8} * a.v_heads] =
        fabsf(beta.y) < 1e-18f ? 0.f : diagonal[1] / beta.y / beta.y;
}

/// Writes dg, the reverse cumulative sum of reads[i] + writes[i] (64 of each) with 4 + 4 further
/// sums in the last row; by one warp. Lane l owns rows 63 - 2 l and 62 - 2 l, so that an inclusive
/// scan runs backwards.
__device__ __forceinline__ void store_decay_gradients(const Args& a, const float* reads,
                                                      const float* writes, const float* sums,
                                                      const float* more_sums, int64_t token_head,
                                                      int length, int lane) {
  int i = 63 - 2 * lane;
  float hi = reads[i] + writes[i], lo = reads[i - 1] + writes[i - 1];
  if (lane == 0)
    for (int m = 0; m < 4; ++m) hi += sums[m] + more_sums[m];
  float s = hi + lo;
#pragma unroll
  for (int d = 1; d < 32; d *= 2) {
    float y = __shfl_up_sync(~0u, s, d);
    if (lane >= d) s += y;
  }
  if (i < length) a.dg[token_head + int64_t{i} * a.v_heads] = s - lo;
  if (i - 1 < length) a.dg[token_head + int64_t{i - 1} * a.v_heads] = s;
}

}  // namespace heddle::ops::cuda::gdn
