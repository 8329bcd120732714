// Tables of segments and chunks, and the part of a chunk that does not depend on the state: norms
// of the keys, cumulative decay and the inverse T' = (I + L')^-1.
#include <algorithm>

#include "args.h"
#include "ops/cuda/mma.cuh"

namespace heddle::ops::cuda::gdn {
namespace {

constexpr int kMaxSorted = 4096;  // more segments than this keep their order
constexpr int kMaxNear = 1024;    // sequences whose beginnings shared memory holds

/// Segments of a sequence: as few as possible, of equal length to a chunk. An empty sequence has
/// one.
__device__ __forceinline__ int segments_of(const Args& a, int chunks) {
  return chunks <= a.segment_chunks ? 1 : (chunks + a.segment_chunks - 1) / a.segment_chunks;
}

/// Where sequences begin; of few sequences in shared memory.
struct Begins {
  const int *chunk, *segment, *token;
};

/// The last of `sequences` whose entry of the prefix sums `first` is at most i.
__device__ __forceinline__ int sequence_of(int sequences, const int* first, int i) {
  int lo = 0, hi = sequences;
  while (hi - lo > 1) {
    int mid = (lo + hi) / 2;
    (first[mid] <= i ? lo : hi) = mid;
  }
  return lo;
}

/// Segment number i, counted in the order of the batch.
__device__ __forceinline__ Segment segment_at(int sequences, const Begins& first, int i) {
  int s = sequence_of(sequences, first.segment, i), index = i - first.segment[s];
  int pieces = first.segment[s + 1] - first.segment[s];
  int chunks = first.chunk[s + 1] - first.chunk[s], token = first.token[s];
  int begin = int(int64_t{chunks} * index / pieces),
      end = int(int64_t{chunks} * (index + 1) / pieces);
  int length = min(first.token[s + 1] - token, end * kChunk) - begin * kChunk;
  int exit = i - s;  // every earlier sequence has one joint less than segments
  return {s,
          token + begin * kChunk,
          length,
          first.chunk[s] + begin,
          index > 0 ? exit - 1 : -1,
          index + 1 < pieces ? exit : -1};
}

/// One CTA. Writes first_chunk, first_segment, segments and chunks.
__global__ void __launch_bounds__(1024) plan_kernel(Args a) {
  __shared__ int length[kMaxSorted];
  __shared__ u64 warp_sum[32];
  __shared__ int chunk_begins[kMaxNear + 1], segment_begins[kMaxNear + 1],
      token_begins[kMaxNear + 1];
  __shared__ u64 carry;  // both prefix sums at once: segments in the high half, chunks in the low
  int tid = threadIdx.x, lane = tid & 31, warp = tid >> 5;
  bool near = a.sequences <= kMaxNear;
  auto begin = [&](int s, u64 sums, int token) {
    a.first_chunk[s] = u32(sums);
    a.first_segment[s] = u32(sums >> 32);
    if (!near) return;
    chunk_begins[s] = u32(sums);
    segment_begins[s] = u32(sums >> 32);
    token_begins[s] = token;
  };
  start_next_kernel();
  if (tid == 0) carry = 0;
  __syncthreads();
  for (int base = 0; base < a.sequences; base += 1024) {
    int s = base + tid, token = 0, end = 0;
    if (s < a.sequences) token = a.cu_seqlens[s], end = a.cu_seqlens[s + 1];
    int chunks = (end - token + kChunk - 1) / kChunk;
    u64 own = s < a.sequences ? u64(segments_of(a, chunks)) << 32 | u32(chunks) : 0, x = own;
    for (int d = 1; d < 32; d *= 2) {
      u64 y = __shfl_up_sync(~0u, x, d);
      if (lane >= d) x += y;
    }
    if (lane == 31) warp_sum[warp] = x;
    __syncthreads();
    if (warp == 0) {
      u64 w = warp_sum[lane], t = w;
      for (int d = 1; d < 32; d *= 2) {
        u64 y = __shfl_up_sync(~0u, t, d);
        if (lane >= d) t += y;
      }
      warp_sum[lane] = t - w + carry;
    }
    __syncthreads();
    x += warp_sum[warp];
    if (s < a.sequences) begin(s, x - own, token);
    if (s == a.sequences - 1) begin(a.sequences, x, end);
    __syncthreads();
    if (tid == 1023) carry = x;
    __syncthreads();
  }
  int segments = u32(carry >> 32), chunks = u32(carry);
  bool sorted = segments <= kMaxSorted;
  const Begins first = near ? Begins{chunk_begins, segment_begins, token_begins}
                            : Begins{a.first_chunk, a.first_segment, a.cu_seqlens};
  for (int i = tid; sorted && i < segments; i += 1024)
    length[i] = segment_at(a.sequences, first, i).length;
  __syncthreads();
  for (int i = tid; i < a.max_segments; i += 1024) {
    int rank = i;
    if (sorted && i < segments) {
      rank = 0;
      int n = length[i];
      for (int t = 0; t < segments; ++t) rank += length[t] > n || (length[t] == n && t < i);
    }
    a.segments[rank] =
        i < segments ? segment_at(a.sequences, first, i) : Segment{-1, 0, 0, 0, -1, -1};
  }
  for (int c = tid; c < chunks; c += 1024) {
    int s = sequence_of(a.sequences, first.chunk, c), index = c - first.chunk[s];
    int token = first.token[s] + index * kChunk;
    a.chunks[c] = {token, min(kChunk, first.token[s + 1] - token), s, index};
  }
}

__device__ __forceinline__ void mma_f16(float (&d)[4], const u32 (&a)[4], u32 b0, u32 b1) {
  asm volatile(
      "mma.sync.aligned.m16n8k16.row.col.f32.f16.f16.f32 {%0,%1,%2,%3}, {%4,%5,%6,%7}, {%8,%9}, "
      "{%0,%1,%2,%3};"
      : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3])
      : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b0), "r"(b1));
}

constexpr int kPitch = 72;        // halves per row of an fp16 64 x 64 matrix; 16 B more than 128 B
constexpr int kDiagStride = 260;  // floats per 16 x 16 diagonal block, padded by one 16-byte access

/// D[16 x 8 N] = A * B with A rows at (ra, ca) of `a`, B rows at (rb, cb) of `b`, 16 KS deep.
template <int KS, int N>
__device__ __forceinline__ void block_product(float (&d)[N][4], const u32 (&a)[KS][4],
                                              const __half* b, int rb, int cb, int lane) {
  zero(d);
#pragma unroll
  for (int k = 0; k < KS; ++k)
#pragma unroll
    for (int n = 0; n < N; n += 2) {
      u32 f[4];
      int m = lane >> 3, r = lane & 7;
      ldmatrix4_trans(
          f, smem_u32(b + (rb + k * 16 + (m & 1) * 8 + r) * kPitch + cb + n * 8 + (m >> 1) * 8));
      mma_f16(d[n], a[k], f[0], f[1]);
      mma_f16(d[n + 1], a[k], f[2], f[3]);
    }
}
/// Diagonal blocks of t hold the inverse, the block at (k0, c0) still L. Computes rows r0.. (16 of
/// them) of -T(k0, k0) L(k0, c0) T(c0, c0), 16 KS columns.
template <int KS>
__device__ __forceinline__ void merged_rows(float (&y)[2 * KS][4], const __half* t, int r0, int k0,
                                            int c0, int lane) {
  u32 a[KS][4];
  int m = lane >> 3, r = lane & 7;
#pragma unroll
  for (int k = 0; k < KS; ++k)
    ldmatrix4(a[k], smem_u32(t + (r0 + (m & 1) * 8 + r) * kPitch + k0 + k * 16 + (m >> 1) * 8));
  block_product<KS>(y, a, t, k0, c0, lane);
#pragma unroll
  for (int k = 0; k < KS; ++k) {
    a[k][0] = pack_f16(-y[2 * k][0], -y[2 * k][1]);
    a[k][1] = pack_f16(-y[2 * k][2], -y[2 * k][3]);
    a[k][2] = pack_f16(-y[2 * k + 1][0], -y[2 * k + 1][1]);
    a[k][3] = pack_f16(-y[2 * k + 1][2], -y[2 * k + 1][3]);
  }
  block_product<KS>(y, a, t, c0, c0, lane);
}
/// Stores these rows over L, from column c0.
template <int N>
__device__ __forceinline__ void store_rows(__half* t, const float (&y)[N][4], int r0, int c0,
                                           int lane) {
#pragma unroll
  for (int n = 0; n < N; ++n) {
    __half* p = t + (r0 + (lane >> 2)) * kPitch + c0 + n * 8 + (lane & 3) * 2;
    *reinterpret_cast<u32*>(p) = pack_f16(y[n][0], y[n][1]);
    *reinterpret_cast<u32*>(p + 8 * kPitch) = pack_f16(y[n][2], y[n][3]);
  }
}

/// g and beta of two tokens a lane for one value head.
struct GateLoad {
  float g0 = 0, g1 = 0, b0 = 0, b1 = 0;
  __device__ void load(const Args& a, const ChunkInfo& info, int h, bool active, int lane) {
    int t = lane * 2;
    const float* g = a.g + (int64_t{info.token} + t) * a.v_heads + h;
    const float* b = a.beta + (int64_t{info.token} + t) * a.v_heads + h;
    bool in0 = active && t < info.length, in1 = active && t + 1 < info.length;
    g0 = in0 ? g[0] * kLog2e : 0.f;
    g1 = in1 ? g[a.v_heads] * kLog2e : 0.f;
    b0 = in0 ? b[0] : 0.f;
    b1 = in1 ? b[a.v_heads] : 0.f;
  }
  /// Writes the inclusive sums of g to `decay`, beta to `strength` and pairs of both to `columns`.
  __device__ void store(float* decay, float* strength, float2* columns, int lane) const {
    float s = g0 + g1;
#pragma unroll
    for (int d = 1; d < 32; d *= 2) {
      float y = __shfl_up_sync(~0u, s, d);
      if (lane >= d) s += y;
    }
    float before = __shfl_up_sync(~0u, s, 1);
    if (lane == 0) before = 0.f;
    float2 sums = make_float2(before + g0, before + g0 + g1);
    *reinterpret_cast<float2*>(decay + lane * 2) = sums;
    *reinterpret_cast<float2*>(strength + lane * 2) = make_float2(b0, b1);
    *reinterpret_cast<float4*>(columns + lane * 2) = make_float4(sums.x, b0, sums.y, b1);
  }
};

constexpr int kPrepareCtas = 5;  // per SM

/// Shared memory of prepare_kernel.
template <int D>
struct PrepareSmem {
  uint8_t k[64 * D * 2];            // K tile
  __half matrices[2][64 * kPitch];  // of two heads; begin as L', end as T'
  float diagonal[8 * kDiagStride];  // diagonal blocks of L'
  float2 columns[2][2][64];         // [pair's parity][head] G and beta
  float r[64];                      // 1 / |k|
  u64 filled;                       // barrier: a whole K tile has come
};

/// Memory that the launch gives: more than 48 KB cannot be declared in the kernel.
template <int D>
constexpr size_t kPrepareDynamic = sizeof(PrepareSmem<D>) > 48 * 1024 ? sizeof(PrepareSmem<D>) : 0;

template <int D>
__device__ __forceinline__ void* prepare_memory() {
  if constexpr (kPrepareDynamic < D >> 0) {
    extern __shared__ __align__(1024) uint8_t smem[];
    return smem;
  } else {
    __shared__ __align__(1024) uint8_t raw[sizeof(PrepareSmem<D>)];
    return raw;
  }
}

/// Persistent CTA (128 threads) over (chunk, key head), all value heads of its group, two at a
/// time; the next item's keys are fetched meanwhile, whole chunks by bulk copy. K K^T of unit keys
/// stays in registers (warp w owns rows 16 w..). Per value head: L' = e^{G_i-G_j} k_i.k_j beta_j
/// below the diagonal; each thread solves one column of a 16 x 16 diagonal block in fp32; two
/// merges in fp16 (entries of T' are bounded by beta) double the block to 32 and 64.
///
/// With M of docs/gdn.md (I + diag(beta) M)^-1 diag(beta) = diag(beta) (I + M diag(beta))^-1: what
/// bf16 rounds has a diagonal of exactly 1, and beta multiplies whole rows of U in fp32. A rounded
/// beta on the diagonal would err alike in all columns of V.
///
/// Shared memory (D = 128): K 16, two fp16 matrices 18, diagonal blocks 8, G, beta and norms 2 = 45
/// KB; 5 CTAs an SM (D = 256: 61 KB, 3 of them on sm_90).
template <class M, int D>
__global__ void __launch_bounds__(128, kPrepareCtas)
    prepare_kernel(const __grid_constant__ Args a) {
  auto& s = *static_cast<PrepareSmem<D>*>(prepare_memory<D>());
  int tid = threadIdx.x, lane = tid & 31, warp = tid >> 5, group = a.v_heads / a.k_heads;
  u32 k_tile = smem_u32(s.k), filled = smem_u32(&s.filled);
  // Nothing writes the blocks above the diagonal.
  for (int i = tid; i < int(sizeof(s.matrices) / 16); i += 128)
    reinterpret_cast<uint4*>(s.matrices)[i] = make_uint4(0, 0, 0, 0);
  if (tid == 0) mbar_init(filled, 1);
  fence_async_proxy();
  __syncthreads();
  wait_for_previous_kernel();
  start_next_kernel();
  int items = a.first_chunk[a.sequences] * a.k_heads, item = blockIdx.x;
  if (item >= items) return;
  ChunkInfo info = a.chunks[item / a.k_heads];
  GateLoad gates;  // of the next pair; warp w < 2: its head w
  auto fetch = [&](int it) {
    int hk = it % a.k_heads;
    if (!M::kHopper || info.length < kChunk) {
      load_tile_async<D>(k_tile, a.k + info.token * a.k_stride + hk * D, a.k_stride, info.length,
                         tid);
      cp_async_commit();
    } else if (tid == 0) {
      mbar_expect(filled, sizeof(s.k));
#pragma unroll
      for (int b = 0; b < D / 64; ++b)
        bulk_load_box(k_tile + b * 8192, &a.maps[kMapK], hk * D + b * 64, info.token, filled);
    }
    gates.load(a, info, hk * group + warp, warp < 2 && warp < group, lane);
  };
  fetch(item);
  int i0 = warp * 16 + (lane >> 2), j0 = (lane & 3) * 2, parity = 0, phase = 0;

  for (; item < items; item += gridDim.x) {
    int chunk = item / a.k_heads, hk = item % a.k_heads, next = item + gridDim.x;
    int length = info.length;
    ChunkInfo here = info;
    if (next < items) info = a.chunks[next / a.k_heads];
    if (M::kHopper && length == kChunk) {
      mbar_wait(filled, phase);
      phase ^= 1;
    } else {
      cp_async_wait<0>();
      fence_async_proxy();
    }
    __syncthreads();
    float kk[8][4], own[2][4];  // own: the block on the diagonal
    M::fence();
    M::template ss<D / 16, false, false>(kk, k_tile, k_tile, false);
    M::commit();
    M::template wait<0>();
    pin(kk);
#pragma unroll
    for (int n = 0; n < 8; ++n) {
#pragma unroll
      for (int e = 0; n / 2 == warp && e < 4; ++e) own[n % 2][e] = kk[n][e];
    }
    // |k_i|^2 is the diagonal; row i meets column i in lane (i % 8) / 2 of its quad.
#pragma unroll
    for (int e = 0; e < 2; ++e) {
      int i = i0 + e * 8;
      float sum = (lane >> 2) & 1 ? own[e][2 * e + 1] : own[e][2 * e];
      float r = i < length ? (a.normalize ? rsqrtf(sum + 1e-6f) : 1.f) : 0.f;
      if ((lane & 3) == (lane >> 3)) {
        a.k_rms[(int64_t{chunk} * a.k_heads + hk) * 64 + i] = r;
        s.r[i] = r;
      }
    }

    for (int pair = 0; pair < group; pair += 2, parity ^= 1) {
      float2(*columns)[64] = s.columns[parity];
      if (warp < 2 && pair + warp < group) {
        int64_t row = (int64_t{chunk} * a.v_heads + hk * group + pair + warp) * 64;
        gates.store(a.decay + row, a.strength + row, columns[warp], lane);
      }
      __syncthreads();  // and the K tile and the previous pair's matrices are no longer read
      if (pair + 2 < group)
        gates.load(a, here, hk * group + pair + 2 + warp, warp < 2 && pair + 2 + warp < group,
                   lane);
      else if (next < items)
        fetch(next);
      if (pair == 0) {
        float2 ri = {s.r[i0], s.r[i0 + 8]};
        auto unit_keys = [&](float(&x)[4], int j) {
          float2 r = *reinterpret_cast<const float2*>(s.r + j);
          x[0] *= ri.x * r.x;
          x[1] *= ri.x * r.y;
          x[2] *= ri.y * r.x;
          x[3] *= ri.y * r.y;
        };
#pragma unroll
        for (int n = 0; n < 6; ++n) {
          if (n / 2 >= warp) break;
          unit_keys(kk[n], n * 8 + j0);
        }
#pragma unroll
        for (int n = 0; n < 2; ++n) unit_keys(own[n], warp * 16 + n * 8 + j0);
      }
#pragma unroll
      for (int hh = 0; hh < 2; ++hh) {
        if (pair + hh >= group) break;
        const float gi[2] = {columns[hh][i0].x, columns[hh][i0 + 8].x};
#pragma unroll
        for (int n = 0; n < 6; ++n) {
          if (n / 2 >= warp) break;
          int j = n * 8 + j0;
          float4 c = *reinterpret_cast<const float4*>(columns[hh] + j);
#pragma unroll
          for (int e = 0; e < 2; ++e)
            *reinterpret_cast<u32*>(s.matrices[hh] + (i0 + e * 8) * kPitch + j) =
                pack_f16(kk[n][2 * e] * c.y * exp2_fast(gi[e] - c.x),
                         kk[n][2 * e + 1] * c.w * exp2_fast(gi[e] - c.z));
        }
        float* block = s.diagonal + (hh * 4 + warp) * kDiagStride;
#pragma unroll
        for (int n = 0; n < 2; ++n) {
          int j = n * 8 + j0, row = lane >> 2;  // in the block
          float4 c = *reinterpret_cast<const float4*>(columns[hh] + warp * 16 + j);
#pragma unroll
          for (int e = 0; e < 2; ++e) {
            int i = row + e * 8;
            // Selected, not multiplied: above the diagonal the exponential may overflow.
            *reinterpret_cast<float2*>(block + i * 16 + j) =
                make_float2(j < i ? own[n][2 * e] * c.y * exp2_fast(gi[e] - c.x) : 0.f,
                            j + 1 < i ? own[n][2 * e + 1] * c.w * exp2_fast(gi[e] - c.z) : 0.f);
          }
        }
      }
      __syncthreads();
      bool active = pair + (warp >> 1) < group;
      __half* t = s.matrices[warp >> 1];
      if (active) {
        int block = (tid >> 4) & 3, j = tid & 15;
        const float* d = s.diagonal + (tid >> 4) * kDiagStride;
        float x[16];
#pragma unroll
        for (int i = 0; i < 16; ++i) {
          float s0 = i == j ? 1.f : 0.f, s1 = 0.f;
#pragma unroll
          for (int m = 0; m < i; m += 4) {
            float4 c = *reinterpret_cast<const float4*>(d + i * 16 + m);
            s0 -= c.x * x[m];
            if (m + 1 < i) s1 -= c.y * x[m + 1];
            if (m + 2 < i) s0 -= c.z * x[m + 2];
            if (m + 3 < i) s1 -= c.w * x[m + 3];
          }
          x[i] = s0 + s1;
        }
#pragma unroll
        for (int i = 0; i < 16; ++i)
          t[(block * 16 + i) * kPitch + block * 16 + j] = __float2half_rn(x[i]);
      }
      __syncthreads();
      int half = (warp & 1) * 32;
      if (active) {
        float y[2][4];
        merged_rows<1>(y, t, half + 16, half + 16, half, lane);
        __syncwarp();
        store_rows(t, y, half + 16, half, lane);
      }
      __syncthreads();
      float y[4][4];
      if (active) merged_rows<2>(y, t, 32 + half / 2, 32, 0, lane);
      __syncthreads();  // both warps of a head have read the whole block of L'
      if (active) store_rows(t, y, 32 + half / 2, 0, lane);
      __syncthreads();
      for (int hh = 0; hh < 2 && pair + hh < group; ++hh) {
        bf16* dst = a.solve + (int64_t{chunk} * a.v_heads + hk * group + pair + hh) * 4096;
#pragma unroll
        for (int n = 0; n < 4; ++n) {
          int i = n * 16 + (tid >> 3), c = tid & 7;
          uint4 x = *reinterpret_cast<const uint4*>(s.matrices[hh] + i * kPitch + c * 8);
          const __half2* p = reinterpret_cast<const __half2*>(&x);
          u32 y[4];
#pragma unroll
          for (int e = 0; e < 4; ++e) {
            float2 f = __half22float2(p[e]);
            y[e] = pack_bf16(f.x, f.y);
          }
          st_global16(dst + i * 64 + ((c ^ (i & 7)) * 8), make_uint4(y[0], y[1], y[2], y[3]));
        }
      }
    }
  }
}

}  // namespace

void launch_plan(const Args& a, cudaStream_t s) {
  plan_kernel<<<1, 1024, 0, s>>>(a);
  check_launch("gated_delta_net plan");
}

void launch_prepare(const Args& a, int head_dim, bool hopper, cudaStream_t s) {
  int device = 0, sms = 0;
  cudaGetDevice(&device);
  cudaDeviceGetAttribute(&sms, cudaDevAttrMultiProcessorCount, device);
  auto kernel = head_dim == 256 ? prepare_kernel<MmaPortable, 256>
                : head_dim == 128
                    ? (hopper ? prepare_kernel<MmaHopper, 128> : prepare_kernel<MmaPortable, 128>)
                    : (hopper ? prepare_kernel<MmaHopper, 64> : prepare_kernel<MmaPortable, 64>);
  size_t bytes = head_dim == 256 ? kPrepareDynamic<256> : 0;
  if (bytes > 0)
    cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, int(bytes));
  dim3 grid(std::min<int64_t>(int64_t{a.max_chunks} * a.k_heads, sms * kPrepareCtas));
  launch_after(kernel, grid, 128, bytes, hopper, s, a);
  check_launch("gated_delta_net prepare");
}

}  // namespace heddle::ops::cuda::gdn
