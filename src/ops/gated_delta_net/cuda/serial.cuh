// Shared by the kernels that walk one segment chunk by chunk with the state in registers. A CTA
// has NS + 2 groups of 128 threads: NS state groups, each owning 64 rows of S^T (rows = V), 16 a
// warp; a side group that computes the state-independent 64 x 64 matrix and writes results out; a
// load group that keeps the next chunks' tiles and row scales in flight.
#pragma once

#include "args.h"
#include "ops/cuda/mma.cuh"

namespace heddle::ops::cuda::gdn {

/// Named barriers of one group each; 0 is __syncthreads.
__device__ __forceinline__ void group_sync() { named_sync(1 + (threadIdx.x >> 7), 128); }

/// Registers a thread of each role may use (setmaxnreg, Hopper only): with NS = 1, 240 + 80 + 48 of
/// the 504 that three groups own, with NS = 2, 2 x 192 + 80 + 48 of 512.
template <class M, int NS>
__device__ __forceinline__ void state_registers() {
  if constexpr (M::kHopper) set_max_registers_up<NS == 1 ? 240 : 192>();
}
template <class M>
__device__ __forceinline__ void side_registers() {
  if constexpr (M::kHopper) set_max_registers_down<80>();
}
template <class M>
__device__ __forceinline__ void load_registers() {
  if constexpr (M::kHopper) set_max_registers_down<48>();
}

/// Chunks that the load group has in shared memory at a time. The wide tiles of head dimension 256
/// leave room for one.
template <class M, int D>
constexpr int kStagesOf = M::kHopper ? 3
                          : D > 128  ? 1
                                     : 2;

/// Row factors of one chunk, in shared memory. With G the cumulative decay and G_C its last value:
/// read_k = e^G / |k|, read_q = scale e^G / |q|, write = e^(G_C - G) / |k|.
struct Scales {
  float read_k[64], read_q[64], write[64];
  float g[64], q[64], k[64];  // G (base 2), scale / |q|, 1 / |k|
  float carry;                // e^G_C
  float pad[3];
};
/// Where T' is applied; fit: of the forward alone, see fitted_score_fragments.
struct SolveScales : Scales {
  float beta[64], fit[64];
};

/// Waits until a stage is filled and makes it visible to wgmma. Whole chunks come by bulk copy,
/// which needs no fence; tails by cp.async.
__device__ __forceinline__ void wait_filled(u32 bar, int phase, bool tail) {
  mbar_wait(bar, phase);
  if (tail) fence_async_proxy();
}

/// Threads of the load group that take part: with bulk copies one warp is enough.
template <class M>
constexpr int kLoaders = M::kHopper ? 32 : 128;
template <class M>
__device__ __forceinline__ void loaders_sync() {
  if constexpr (M::kHopper)
    __syncwarp();
  else
    group_sync();
}

/// The values from which a thread below 64 makes row `i` of the scales; loaded early, stored late.
/// Without kQuery the factor of q is left out, without kBeta beta.
template <bool kQuery, bool kBeta>
struct ScaleLoad {
  float g, last, rq = 0, rk, beta = 0;
  __device__ void load(const Args& a, int64_t chunk, int h, int hk, int i) {
    g = a.decay[(chunk * a.v_heads + h) * 64 + i];
    last = a.decay[(chunk * a.v_heads + h) * 64 + 63];
    if (kQuery) rq = a.q_rms[(chunk * a.k_heads + hk) * 64 + i] * a.scale;
    rk = a.k_rms[(chunk * a.k_heads + hk) * 64 + i];
    if (kBeta) beta = a.strength[(chunk * a.v_heads + h) * 64 + i];
  }
  template <class S>
  __device__ void store(S& s, int i) const {
    float e = exp2_fast(g);
    s.read_k[i] = e * rk;
    s.write[i] = exp2_fast(last - g) * rk;
    s.g[i] = g;
    s.k[i] = rk;
    if (kQuery) s.q[i] = rq;
    if constexpr (kBeta) s.beta[i] = beta;
    s.read_q[i] = kQuery ? e * rq : e;
    if (i == 0) s.carry = exp2_fast(last);
  }
};
/// All 64 rows, by L threads.
template <int L, bool kQuery, bool kBeta = true>
struct ScaleRows {
  ScaleLoad<kQuery, kBeta> row[64 / L > 0 ? 64 / L : 1];
  __device__ void load(const Args& a, int64_t chunk, int h, int hk, int tid) {
    if (tid >= 64) return;
    for (int i = 0; i * L < 64; ++i) row[i].load(a, chunk, h, hk, tid + i * L);
  }
  template <class S>
  __device__ void store(S& s, int tid) const {
    if (tid >= 64) return;
    for (int i = 0; i * L < 64; ++i) row[i].store(s, tid + i * L);
  }
};

/// A segment, value head and columns of V (from v0) that this CTA owns; longest segments come
/// first, unused entries of the table (sequence < 0) last.
struct Work : Segment {
  int chunks, h, hk, v0;
  /// head_part: value head * parts + which v_cols columns.
  __device__ Work(const Args& a, int segment, int head_part, int parts, int v_cols)
      : Segment(a.segments[segment]) {
    h = head_part / parts;
    v0 = (head_part % parts) * v_cols;
    hk = h / (a.v_heads / a.k_heads);
    chunks = (length + kChunk - 1) / kChunk;
  }
  __device__ void keep_first(int n) {
    chunks = n;
    length = min(length, n * kChunk);
  }
  __device__ void keep_last(int n) {
    int skipped = chunks - n;
    chunks = n;
    token += skipped * kChunk;
    length -= skipped * kChunk;
    first_chunk += skipped;
  }
  __device__ int valid(int c) const { return min(kChunk, length - c * kChunk); }
  /// The state at `joint`, or at the end of the sequence where joint is -1; may be null.
  template <class T>
  __device__ T* state(const Args& a, int joint, float* joints, T* ends, int dim) const {
    T* states = joint < 0 ? ends : joints;
    if (states == nullptr) return nullptr;
    return states + (int64_t{joint < 0 ? sequence : joint} * a.v_heads + h) * dim * dim;
  }
};

/// A state is taken as forgotten once decay alone has shrunk it by 2^-32: unit keys and beta <= 2
/// never lengthen it, and fp32 keeps 24 bits.
constexpr float kForgotten = -32;

/// How far the segment's state at one end reaches into it: the chunks, counted from that end, that
/// can still be seen there, and whether the state across the other end can. Every thread of a warp
/// calls it.
struct Reach {
  int chunks;
  bool across = true;
  __device__ Reach(const Args& a, const Work& w, bool from_end, int lane) : chunks(w.chunks) {
    if (!a.normalize) return;  // keys longer than 1 may lengthen the state
    float before = 0;          // decay of all chunks of earlier rounds
    for (int i = 0; i < w.chunks; i += 32) {
      int n = i + lane, c = w.first_chunk + (from_end ? w.chunks - 1 - n : n);
      float sum = n < w.chunks ? a.decay[(int64_t{c} * a.v_heads + w.h) * 64 + 63] : 0.f;
#pragma unroll
      for (int d = 1; d < 32; d *= 2) {
        float y = __shfl_up_sync(~0u, sum, d);
        if (lane >= d) sum += y;
      }
      u32 forgotten = __ballot_sync(~0u, before + sum < kForgotten);
      if (forgotten != 0) {
        chunks = i + __ffs(forgotten);
        across = false;
        return;
      }
      before += __shfl_sync(~0u, sum, 31);
    }
  }
};

/// Starts filling a stage (K, Q if kQuery, 64 NS columns of a value tensor unless null, T) for
/// chunk c and arrives at `full` once per loader when it and the scales are there.
template <class M, int D, int NS, bool kQuery = true>
__device__ __forceinline__ void load_stage(const Args& a, const Work& w, int c, u32 stage, u32 full,
                                           Map value_map, const bf16* value, int64_t value_stride,
                                           int tid) {
  constexpr int L = kLoaders<M>;
  constexpr u32 kWide = 64 * D * 2;
  u32 q = stage + kWide, v = q + (kQuery ? kWide : 0), solve = v + NS * 8192;
  int64_t t = w.token + c * kChunk;
  const bf16* image = a.solve + (int64_t{w.first_chunk + c} * a.v_heads + w.h) * 4096;
  int valid = w.valid(c);
  if (M::kHopper && valid == kChunk) {
    if (tid > 0) return mbar_arrive(full);
    mbar_expect(full, solve + 8192 - stage - (value ? 0 : NS * 8192));
#pragma unroll
    for (int b = 0; b < D / 64; ++b) {
      bulk_load_box(stage + b * 8192, &a.maps[kMapK], w.hk * D + b * 64, t, full);
      if (kQuery) bulk_load_box(q + b * 8192, &a.maps[kMapQ], w.hk * D + b * 64, t, full);
    }
#pragma unroll
    for (int b = 0; b < NS && value; ++b)
      bulk_load_box(v + b * 8192, &a.maps[value_map], w.h * D + w.v0 + b * 64, t, full);
    bulk_load(solve, image, 8192, full);
    return;
  }
  load_tile_async<D, L>(stage, a.k + t * a.k_stride + w.hk * D, a.k_stride, valid, tid);
  if (kQuery) load_tile_async<D, L>(q, a.q + t * a.q_stride + w.hk * D, a.q_stride, valid, tid);
  if (value)
    load_tile_async<NS * 64, L>(v, value + t * value_stride + w.h * D + w.v0, value_stride, valid,
                                tid);
  load_image_async<8192, L>(solve, image, tid);
  cp_async_arrive(full);
}

/// Starts writing a 64 x 64 NS tile of chunk c out of shared memory; a whole chunk as one bulk
/// group of thread 0, a tail by all loaders at once.
template <class M, int D, int NS>
__device__ __forceinline__ void store_chunk(const Args& a, const Work& w, int c, u32 tile, Map map,
                                            bf16* dst, int64_t stride, int tid) {
  int64_t t = w.token + c * kChunk;
  int valid = w.valid(c);
  if (M::kHopper && valid == kChunk) {
    if (tid == 0) {
#pragma unroll
      for (int b = 0; b < NS; ++b)
        bulk_store_box(&a.maps[map], w.h * D + w.v0 + b * 64, t, tile + b * 8192);
    }
  } else {
    store_tile<NS * 64, kLoaders<M>>(dst + t * stride + w.h * D + w.v0, tile, stride, valid, tid);
  }
  if (M::kHopper && tid == 0) bulk_commit();
}

/// S^T rows 16 warp .. of this group in accumulator layout, from or to fp32 [K, V] in global
/// memory.
template <int NB>
__device__ __forceinline__ void load_state(float (&s)[NB][4], const float* src, int v_dim, int v0,
                                           int warp, int lane) {
  if (src == nullptr) return zero(s);
  const float* p = src + v0 + warp * 16 + (lane >> 2);
#pragma unroll
  for (int n = 0; n < NB; ++n) {
    int64_t k = n * 8 + (lane & 3) * 2;
    s[n][0] = p[k * v_dim];
    s[n][1] = p[(k + 1) * v_dim];
    s[n][2] = p[k * v_dim + 8];
    s[n][3] = p[(k + 1) * v_dim + 8];
  }
}
template <int NB>
__device__ __forceinline__ void save_state(const float (&s)[NB][4], float* dst, int v_dim, int v0,
                                           int warp, int lane) {
  if (dst == nullptr) return;
  float* p = dst + v0 + warp * 16 + (lane >> 2);
#pragma unroll
  for (int n = 0; n < NB; ++n) {
    int64_t k = n * 8 + (lane & 3) * 2;
    p[k * v_dim] = s[n][0];
    p[(k + 1) * v_dim] = s[n][1];
    p[k * v_dim + 8] = s[n][2];
    p[(k + 1) * v_dim + 8] = s[n][3];
  }
}

/// Accumulators to bf16 A fragments of the next product: columns become the contraction.
template <int KS>
__device__ __forceinline__ void to_fragments(u32 (&f)[KS][4], const float (&s)[2 * KS][4]) {
#pragma unroll
  for (int k = 0; k < KS; ++k) {
    f[k][0] = pack_bf16(s[2 * k][0], s[2 * k][1]);
    f[k][1] = pack_bf16(s[2 * k][2], s[2 * k][3]);
    f[k][2] = pack_bf16(s[2 * k + 1][0], s[2 * k + 1][1]);
    f[k][3] = pack_bf16(s[2 * k + 1][2], s[2 * k + 1][3]);
  }
}
/// Multiplies by a factor per column.
template <int KS>
__device__ __forceinline__ void to_fragments(u32 (&f)[KS][4], const float (&s)[2 * KS][4],
                                             const float* column, int lane) {
#pragma unroll
  for (int k = 0; k < KS; ++k)
#pragma unroll
    for (int e = 0; e < 2; ++e) {
      float2 c = *reinterpret_cast<const float2*>(column + k * 16 + e * 8 + (lane & 3) * 2);
      f[k][2 * e] = pack_bf16(s[2 * k + e][0] * c.x, s[2 * k + e][1] * c.y);
      f[k][2 * e + 1] = pack_bf16(s[2 * k + e][2] * c.x, s[2 * k + e][3] * c.y);
    }
}
/// bf16 fragments times a factor per column.
template <int KS>
__device__ __forceinline__ void scale_fragments(u32 (&out)[KS][4], const u32 (&f)[KS][4],
                                                const float* column, int lane) {
#pragma unroll
  for (int k = 0; k < KS; ++k)
#pragma unroll
    for (int e = 0; e < 2; ++e) {
      float2 c = *reinterpret_cast<const float2*>(column + k * 16 + e * 8 + (lane & 3) * 2);
#pragma unroll
      for (int r = 2 * e; r < 2 * e + 2; ++r)
        out[k][r] = pack_bf16(bf16_lo(f[k][r]) * c.x, bf16_hi(f[k][r]) * c.y);
    }
}
/// V - X e^G, transposed, as fragments: 16 rows of V's columns a warp. v: this group's tile of V.
__device__ __forceinline__ void residual_fragments(u32 (&f)[4][4], const float (&x)[8][4], u32 v,
                                                   const float* read_k, int warp, int lane) {
#pragma unroll
  for (int n = 0; n < 4; ++n) {
    load_fragment_trans(f[n], v, 64, n * 16, warp * 16, lane);
#pragma unroll
    for (int r = 0; r < 4; ++r) {
      float2 e = *reinterpret_cast<const float2*>(read_k + n * 16 + (r >> 1) * 8 + (lane & 3) * 2);
      const float* y = &x[2 * n + (r >> 1)][(r & 1) * 2];
      f[n][r] = pack_bf16(bf16_lo(f[n][r]) - e.x * y[0], bf16_hi(f[n][r]) - e.y * y[1]);
    }
  }
}
template <int NB>
__device__ __forceinline__ void scale(float (&s)[NB][4], float f) {
#pragma unroll
  for (int n = 0; n < NB; ++n)
#pragma unroll
    for (int e = 0; e < 4; ++e) s[n][e] *= f;
}

/// The element in column r of row r = 16 warp + lane / 4 + 8 e; every lane of the row gets it.
__device__ __forceinline__ float diagonal(const float (&acc)[8][4], int e, int warp, int lane) {
  float d = 0.f;
#pragma unroll
  for (int w = 0; w < 4; ++w)  // the same way in a whole warp: no index known at run time
    if (w == warp) d = (lane >> 2) & 1 ? acc[2 * w + e][2 * e + 1] : acc[2 * w + e][2 * e];
  return __shfl_sync(~0u, d, (lane & ~3) | (lane >> 3));
}

/// The causal score matrix e^{G_i - G_j} scale q_i.k_j, i >= j, from raw products held by the
/// service group, as fragments. kTransposed: accumulator rows are j, columns i.
template <bool kTransposed>
__device__ __forceinline__ void score_fragments(u32 (&f)[4][4], float (&acc)[8][4], const Scales& s,
                                                int warp, int lane) {
#pragma unroll
  for (int e = 0; e < 2; ++e) {
    int r = warp * 16 + (lane >> 2) + e * 8;
    float gr = s.g[r], row = kTransposed ? s.k[r] : s.q[r];
    const float* column = kTransposed ? s.q : s.k;
#pragma unroll
    for (int n = 0; n < 8; ++n) {
      int c = n * 8 + (lane & 3) * 2;
      float2 gc = *reinterpret_cast<const float2*>(s.g + c);
      float2 cc = *reinterpret_cast<const float2*>(column + c);
      float d0 = kTransposed ? gc.x - gr : gr - gc.x, d1 = kTransposed ? gc.y - gr : gr - gc.y;
      bool in0 = kTransposed ? c >= r : r >= c, in1 = kTransposed ? c + 1 >= r : r >= c + 1;
      // Selected, not multiplied: above the diagonal the exponential may overflow.
      float x0 = in0 ? acc[n][2 * e] * row * cc.x * exp2_fast(d0) : 0.f;
      float x1 = in1 ? acc[n][2 * e + 1] * row * cc.y * exp2_fast(d1) : 0.f;
      f[n >> 1][(n & 1) * 2 + e] = pack_bf16(x0, x1);
    }
  }
}

/// Fragments for the forward, not transposed: q_i raw and without scale, and row i times a factor
/// next to 1 that makes its diagonal exact in bf16, since an error there is one of all columns of
/// O alike. s.fit takes the inverse for whoever multiplies row i of O in the end; s.read_q, which
/// multiplies what P U is added to, takes the factor.
__device__ __forceinline__ void fitted_score_fragments(u32 (&f)[4][4], const float (&acc)[8][4],
                                                       SolveScales& s, int warp, int lane) {
  int row = warp * 16 + (lane >> 2);
  float gr[2];
#pragma unroll
  for (int e = 0; e < 2; ++e) {
    int r = row + e * 8;
    float exact = diagonal(acc, e, warp, lane) * s.k[r];
    float rounded = __bfloat162float(__float2bfloat16_rn(exact));
    float factor = fabsf(exact) > 1e-30f ? __fdividef(rounded, exact) : 1.f;
    if ((lane & 3) == 0) {
      s.read_q[r] *= factor;
      s.fit[r] = __fdividef(1.f, factor);
    }
    gr[e] = s.g[r] + __log2f(factor);
  }
#pragma unroll
  for (int n = 0; n < 8; ++n) {
    int c = n * 8 + (lane & 3) * 2;
    float2 gc = *reinterpret_cast<const float2*>(s.g + c);
    float2 kc = *reinterpret_cast<const float2*>(s.k + c);
#pragma unroll
    for (int e = 0; e < 2; ++e) {
      int r = row + e * 8;
      float x0 = r >= c ? acc[n][2 * e] * kc.x * exp2_fast(gr[e] - gc.x) : 0.f;
      float x1 = r >= c + 1 ? acc[n][2 * e + 1] * kc.y * exp2_fast(gr[e] - gc.y) : 0.f;
      f[n >> 1][(n & 1) * 2 + e] = pack_bf16(x0, x1);
    }
  }
}

}  // namespace heddle::ops::cuda::gdn
