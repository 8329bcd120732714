#include "ops/attention/cuda/packed_backward.h"
#include "ops/cuda/element.h"
#include "ops/cuda/tensor_map.h"
#include "ops/gated_delta_net/cuda/mma.cuh"

namespace heddle::ops::cuda {
namespace {

using namespace gdn;
using Mma = MmaHopper;

constexpr int kRows = kPackedBackwardRows, kDim = kPackedBackwardDim;
constexpr int kGroup = 128, kThreads = 3 * kGroup;  // one group loads, two multiply
constexpr int kConsumers = 2 * kGroup;
constexpr u32 kTile = kRows * kDim * 2, kSquare = kRows * kRows * 2;
constexpr int kTileFloats = kRows * kDim;
constexpr float kLog2e = 1.4426950408889634f;

// Shared memory, from a multiple of 1024 on. Queries, gradients of the output, probabilities and
// their gradients have two places each.
constexpr u32 kKeys = 0, kValues = kTile, kQueries = 2 * kTile, kGradO = 4 * kTile,
              kProbabilities = 6 * kTile, kGradScores = 6 * kTile + 2 * kSquare,
              kBarriers = 6 * kTile + 4 * kSquare, kSharedBytes = kBarriers + 128 + 1024;
constexpr u32 kFullKeys = kBarriers, kFullQueries = kBarriers + 8, kFullGradO = kBarriers + 24,
              kEmptyQueries = kBarriers + 40, kEmptyGradO = kBarriers + 56;

enum NamedBarrier { kHaveProbabilities = 1, kHaveGradScores, kOwn, kOwnOther, kAllProducts };

struct Args {
  CUtensorMap q, k, v, d_o;
  const float *lse, *delta;
  const int32_t* cu_seqlens;
  const int2* work;
  float* dq_sum;
  bf16 *dk, *dv;
  int q_heads, k_heads, tiles;
  float scale;
};

/// Key tile `n` of a sequence for one head of keys.
struct Work {
  int sequence, first, length, n, head, heads;  ///< heads: of queries that read this one

  __device__ __forceinline__ int tiles() const { return (length + kRows - 1) / kRows; }
  __device__ __forceinline__ int steps() const { return (tiles() - n) * heads; }
  __device__ __forceinline__ int valid(int tile) const { return min(kRows, length - tile * kRows); }
  /// Tiles of the sum of dq begin here: sequences do not share one.
  __device__ __forceinline__ int first_tile() const { return first / kRows + sequence; }
};

__device__ __forceinline__ Work unpack_work(int2 entry, const int32_t* cu_seqlens, int heads) {
  Work w;
  w.sequence = entry.x;
  w.first = cu_seqlens[entry.x];
  w.length = cu_seqlens[entry.x + 1] - w.first;
  w.n = entry.y & 0xffff;
  w.head = entry.y >> 16;
  w.heads = heads;
  return w;
}

__device__ __forceinline__ void load_tile(u32 to, const CUtensorMap& map, int row, int head,
                                          u32 bar) {
#pragma unroll
  for (int block = 0; block < kDim / 64; ++block)
    bulk_load_box(to + block * kBlockBytes, &map, head * kDim + block * 64, row, bar);
}

__device__ __forceinline__ void produce(const Args& a, const Work& w, u32 smem) {
  const int row = w.first + w.n * kRows;
  mbar_expect(smem + kFullKeys, 2 * kTile);
  load_tile(smem + kKeys, a.k, row, w.head, smem + kFullKeys);
  load_tile(smem + kValues, a.v, row, w.head, smem + kFullKeys);
  int i = 0;
  for (int head = w.head * w.heads; head < (w.head + 1) * w.heads; ++head) {
    for (int m = w.n; m < w.tiles(); ++m, ++i) {
      const u32 place = i & 1;
      const int q_row = w.first + m * kRows, phase = (i >> 1 & 1) ^ 1;
      const u32 q_bar = smem + kFullQueries + 8 * place, o_bar = smem + kFullGradO + 8 * place;
      mbar_wait(smem + kEmptyQueries + 8 * place, phase);
      mbar_expect(q_bar, kTile);
      load_tile(smem + kQueries + place * kTile, a.q, q_row, head, q_bar);
      mbar_wait(smem + kEmptyGradO + 8 * place, phase);
      mbar_expect(o_bar, kTile);
      load_tile(smem + kGradO + place * kTile, a.d_o, q_row, head, o_bar);
    }
  }
}

__device__ __forceinline__ void named_arrive(int id, int threads) {
  asm volatile("bar.arrive %0, %1;" ::"r"(id), "r"(threads) : "memory");
}

/// Adds a block of 64 columns of dq, in the order of the registers that hold it, to the sum in
/// memory. Shared memory is free again when the copy engine has read it.
__device__ __forceinline__ void add_to_sum(const float (&dq)[8][4], u32 by_way_of, float* sum,
                                           int barrier, int tid) {
#pragma unroll
  for (int j = 0; j < 8; ++j)
    asm volatile("st.shared.v4.f32 [%0], {%1, %2, %3, %4};" ::"r"(by_way_of +
                                                                  (j * kGroup + tid) * 16),
                 "f"(dq[j][0]), "f"(dq[j][1]), "f"(dq[j][2]), "f"(dq[j][3])
                 : "memory");
  fence_async_proxy();
  named_sync(barrier, kGroup);
#if __CUDA_ARCH__ >= 900
  if (tid == 0)
    asm volatile("cp.reduce.async.bulk.global.shared::cta.bulk_group.add.f32 [%0], [%1], %2;" ::"l"(
                     sum),
                 "r"(by_way_of), "n"(kRows * 64 * 4)
                 : "memory");
#endif
  if (tid == 0) bulk_commit();
}

/// Rows from `valid` on belong to others, and even times zero they may not be added.
__device__ __forceinline__ void clear_rows(u32 tile, int valid, int tid) {
  for (int i = valid * 32 + tid; i < kRows * 32; i += kGroup)
    asm volatile("st.shared.v4.u32 [%0], {%1, %1, %1, %1};" ::"r"(
                     tile_address(tile, kRows, i / 32, i % 32 * 8)),
                 "r"(0)
                 : "memory");
}

/// Which rows of a score tile, 16 a warp, this thread holds: `row` and `row` + 8.
struct Lane {
  int tid, lane, warp, row;

  __device__ __forceinline__ Lane()
      : tid(threadIdx.x & 127), lane(tid & 31), warp(tid >> 5), row(warp * 16 + lane / 4) {}
};

/// Scores to probabilities, in shared memory too.
__device__ __forceinline__ void probabilities(float (&s)[8][4], const float (&lse)[2], float scale,
                                              bool masked, bool diagonal, int valid, u32 to,
                                              const Lane& at) {
#pragma unroll
  for (int j = 0; j < 8; ++j) {
#pragma unroll
    for (int e = 0; e < 4; ++e) {
      float p = exp2_fast(s[j][e] * scale - lse[e / 2]);
      if (masked) {
        const int row = at.row + e / 2 * 8, column = j * 8 + at.lane % 4 * 2 + e % 2;
        if (row >= valid || (diagonal && column > row)) p = 0;
      }
      s[j][e] = p;
    }
  }
#pragma unroll
  for (int j = 0; j < 8; j += 2) {
    const u32 f[4] = {pack_bf16(s[j][0], s[j][1]), pack_bf16(s[j][2], s[j][3]),
                      pack_bf16(s[j + 1][0], s[j + 1][1]), pack_bf16(s[j + 1][2], s[j + 1][3])};
    store_fragment(to, kRows, at.warp * 16, j * 8, at.lane, f);
  }
}

/// What is no probability (zero) gets no gradient, whatever stands beside it.
__device__ __forceinline__ float grad_score(float p, float dp, float delta) {
  return p == 0 ? 0.f : p * (dp - delta);
}

/// Gradients of the probabilities to those of the scores, in shared memory.
__device__ __forceinline__ void grad_scores(const float (&dp)[8][4], const float (&delta)[2],
                                            u32 from, u32 to, const Lane& at) {
  const int m = at.lane >> 3, r = at.lane & 7;
#pragma unroll
  for (int j = 0; j < 8; j += 2) {
    u32 p[4], f[4];
    ldmatrix4(p, tile_address(from, kRows, at.warp * 16 + (m & 1) * 8 + r, j * 8 + (m >> 1) * 8));
#pragma unroll
    for (int e = 0; e < 4; ++e) {
      const float* d = &dp[j + e / 2][e % 2 * 2];
      f[e] = pack_bf16(grad_score(bf16_lo(p[e]), d[0], delta[e % 2]),
                       grad_score(bf16_hi(p[e]), d[1], delta[e % 2]));
    }
    store_fragment(to, kRows, at.warp * 16, j * 8, at.lane, f);
  }
}

/// One group's half, 128 columns, of a tile of dk or dv to memory by way of shared memory.
__device__ __forceinline__ void store_half(const float (&x)[16][4], float scale, u32 tile, bf16* to,
                                           int64_t stride, int valid, int barrier, const Lane& at) {
#pragma unroll
  for (int j = 0; j < 16; j += 2) {
    u32 f[4];
#pragma unroll
    for (int e = 0; e < 4; ++e)
      f[e] = pack_bf16(x[j + e / 2][e % 2 * 2] * scale, x[j + e / 2][e % 2 * 2 + 1] * scale);
    store_fragment(tile, kRows, at.warp * 16, j * 8, at.lane, f);
  }
  named_sync(barrier, kGroup);
  store_tile<kDim / 2>(to, tile, stride, valid, at.tid);
}

/// The two groups that multiply. kScores: this one makes the scores and the probabilities, the
/// other the gradients of both; each makes 128 columns of dq, dk and dv. What a group makes for the
/// next tile of queries is multiplied while the other still works on this one.
template <bool kScores>
__device__ __forceinline__ void consume(const Args& a, const Work& w, u32 smem) {
  const Lane at;
  constexpr int kOwnBarrier = kScores ? kOwn : kOwnOther, kHalf = kScores ? 0 : 1;
  const u32 full_x = smem + (kScores ? kFullQueries : kFullGradO),
            full_y = smem + (kScores ? kFullGradO : kFullQueries),
            x = smem + (kScores ? kQueries : kGradO), y = smem + (kScores ? kKeys : kValues);
  const float* stats = kScores ? a.lse : a.delta;
  float dv[16][4], dk[16][4], s[8][4], dq[8][4];
  zero(dv);
  zero(dk);
  int head = w.head * w.heads, m = w.n;
  const int steps = w.steps(), tiles = w.tiles();
  const auto load_stats = [&](float(&to)[2]) {
#pragma unroll
    for (int e = 0; e < 2; ++e) {
      const int row = min(at.row + 8 * e, w.valid(m) - 1);
      to[e] = stats[int64_t{w.first + m * kRows + row} * a.q_heads + head];
      if constexpr (kScores) to[e] *= kLog2e;
    }
  };
  float now[2], next[2];
  load_stats(next);
  mbar_wait(smem + kFullKeys, 0);
  mbar_wait(full_x, 0);
  Mma::fence();
  Mma::ss<16, false, false>(s, x, y, false);
  Mma::commit();
  Mma::wait<0>();
  pin(s);
#pragma unroll 1
  for (int i = 0; i < steps; ++i) {
    const u32 place = i & 1, phase = i >> 1 & 1;
    const u32 q = smem + kQueries + place * kTile, d_o = smem + kGradO + place * kTile,
              p = smem + kProbabilities + place * kSquare,
              ds = smem + kGradScores + place * kSquare;
    const int valid = w.valid(m);
    const bool diagonal = m == w.n;
    float* dq_sum = a.dq_sum + (int64_t{head} * a.tiles + w.first_tile() + m) * kTileFloats +
                    kHalf * 16 * kGroup * 4;
    now[0] = next[0], now[1] = next[1];
    if (++m == tiles) m = w.n, ++head;
    const bool more = i + 1 < steps;
    if (more) load_stats(next);

    if constexpr (kScores) {
      probabilities(s, now, a.scale * kLog2e, diagonal || valid < kRows, diagonal, valid, p, at);
      mbar_wait(full_y + 8 * place, phase);
      if (valid < kRows) {
        clear_rows(q, valid, at.tid);
        clear_rows(d_o, valid, at.tid);
        if (diagonal) clear_rows(smem + kKeys, valid, at.tid);
      }
      fence_async_proxy();
      named_sync(kOwnBarrier, kGroup);
      named_arrive(kHaveProbabilities, kConsumers);
    } else {
      named_sync(kHaveProbabilities, kConsumers);
      grad_scores(s, now, p, ds, at);
      mbar_wait(full_y + 8 * place, phase);
      fence_async_proxy();
      named_sync(kOwnBarrier, kGroup);
      named_arrive(kHaveGradScores, kConsumers);
    }
    if (i > 0 && at.tid == 0) {  // the last step's sum
      bulk_wait_read<0>();
      mbar_arrive(smem + kEmptyQueries + 8 * (place ^ 1));
    }
    Mma::fence();
    Mma::ss<4, true, true>(dv, p, d_o + kHalf * 2 * kBlockBytes, true);
    Mma::commit();
    if constexpr (kScores) named_sync(kHaveGradScores, kConsumers);
    Mma::fence();
    Mma::ss<4, false, true>(dq, ds, smem + kKeys + kHalf * 2 * kBlockBytes, false);
    Mma::commit();
    Mma::ss<4, true, true>(dk, ds, q + kHalf * 2 * kBlockBytes, true);
    Mma::commit();
    Mma::wait<1>();
    pin(dq);
    // What a group stages lies where it alone still read: its half of what this step is done with.
    add_to_sum(dq, d_o + kHalf * 2 * kBlockBytes, dq_sum, kOwnBarrier, at.tid);
    Mma::fence();
    Mma::ss<4, false, true>(dq, ds, smem + kKeys + (kHalf * 2 + 1) * kBlockBytes, false);
    Mma::commit();
    if (more) {
      const u32 other = place ^ 1;
      mbar_wait(full_x + 8 * other, (i + 1) >> 1 & 1);
      Mma::fence();
      Mma::ss<16, false, false>(s, x + other * kTile, y, false);
      Mma::commit();
      Mma::wait<1>();
    } else {
      Mma::wait<0>();
    }
    pin(dq);
    add_to_sum(dq, q + kHalf * 2 * kBlockBytes, dq_sum + 8 * kGroup * 4, kOwnBarrier, at.tid);
    if (at.tid == 0) {
      bulk_wait_read<1>();
      mbar_arrive(smem + kEmptyGradO + 8 * place);
    }
    Mma::wait<0>();
    pin(s);
  }
  if (at.tid == 0) bulk_wait_read<0>();
  pin(dv);
  pin(dk);
  named_sync(kAllProducts, kConsumers);
  const int64_t stride = int64_t{a.k_heads} * kDim;
  const int64_t to = (w.first + w.n * kRows) * stride + w.head * kDim + kHalf * 128;
  const int valid = w.valid(w.n);
  store_half(dv, 1.f, smem + kGradO + kHalf * 2 * kBlockBytes, a.dv + to, stride, valid, kOwnBarrier,
             at);
  store_half(dk, a.scale, smem + kQueries + kHalf * 2 * kBlockBytes, a.dk + to, stride, valid,
             kOwnBarrier, at);
}

__global__ void __launch_bounds__(kThreads, 1) gradients(const __grid_constant__ Args a) {
  extern __shared__ uint8_t raw[];
  const int2 entry = a.work[blockIdx.x];
  if (entry.x < 0) return;
  const u32 smem = (smem_u32(raw) + 1023) & ~1023u;
  if (threadIdx.x == 0) {
    for (u32 full = kFullKeys; full < kEmptyQueries; full += 8) mbar_init(smem + full, 1);
    for (u32 place = 0; place < 2; ++place) {
      mbar_init(smem + kEmptyQueries + 8 * place, 2);
      mbar_init(smem + kEmptyGradO + 8 * place, 2);
    }
    fence_async_proxy();
  }
  __syncthreads();
  const Work w = unpack_work(entry, a.cu_seqlens, a.q_heads / a.k_heads);
  const int group = __shfl_sync(0xffffffffu, threadIdx.x / kGroup, 0);
  if (group == 0) {
    set_max_registers_down<40>();
    if (threadIdx.x == 0) produce(a, w, smem);
  } else if (group == 1) {
    set_max_registers_up<232>();
    consume<true>(a, w, smem);
  } else {
    set_max_registers_up<232>();
    consume<false>(a, w, smem);
  }
}

/// delta = sum over a head of o * d_o, a warp a row.
__global__ void __launch_bounds__(256) deltas(const uint4* o, const uint4* d_o, float* delta,
                                              int64_t rows) {
  const int64_t row = int64_t{blockIdx.x} * 8 + threadIdx.x / 32;
  if (row >= rows) return;
  const int64_t i = row * 32 + threadIdx.x % 32;
  const uint4 x = o[i], y = d_o[i];
  const u32 xs[4] = {x.x, x.y, x.z, x.w}, ys[4] = {y.x, y.y, y.z, y.w};
  float sum = 0;
#pragma unroll
  for (int j = 0; j < 4; ++j)
    sum += bf16_lo(xs[j]) * bf16_lo(ys[j]) + bf16_hi(xs[j]) * bf16_hi(ys[j]);
#pragma unroll
  for (int offset = 16; offset > 0; offset /= 2) sum += __shfl_xor_sync(0xffffffffu, sum, offset);
  if (threadIdx.x % 32 == 0) delta[row] = sum;
}

/// The list of work: the longest sequences first, so that none of them is begun last; the tiles of
/// one together, as they read the same queries. A warp takes a sequence; -1 stands behind the end.
__global__ void __launch_bounds__(1024) list_work(const int32_t* cu_seqlens, int sequences,
                                                  int k_heads, int entries, int2* work) {
  const int lane = threadIdx.x % 32;
  const auto tiles_of = [&](int s) {
    return (cu_seqlens[s + 1] - cu_seqlens[s] + kRows - 1) / kRows;
  };
  for (int s = threadIdx.x / 32; s <= sequences; s += blockDim.x / 32) {
    const int own = s < sequences ? tiles_of(s) : 0;
    int place = 0;
    for (int other = lane; other < sequences; other += 32) {
      const int tiles = tiles_of(other);
      if (tiles > own || (tiles == own && other < s)) place += tiles;
    }
    place = __reduce_add_sync(0xffffffffu, place) * k_heads;
    if (s == sequences) {
      for (int i = place + lane; i < entries; i += 32) work[i] = {-1, 0};
    } else {
      for (int i = lane; i < own * k_heads; i += 32)
        work[place + i] = {s, i % own | i / own << 16};
    }
  }
}

/// The sums of dq, which lie in the order of the registers that made them, to rows of bf16.
__global__ void __launch_bounds__(256) round_dq(const Args a, bf16* dq) {
  const int2 entry = a.work[blockIdx.x];
  if (entry.x < 0) return;
  const Work w = unpack_work(entry, a.cu_seqlens, a.q_heads / a.k_heads);
  const int valid = w.valid(w.n), lane = threadIdx.x % 32;
  for (int head = w.head * w.heads; head < (w.head + 1) * w.heads; ++head) {
    const float4* sums = reinterpret_cast<const float4*>(
        a.dq_sum + (int64_t{head} * a.tiles + w.first_tile() + w.n) * kTileFloats);
#pragma unroll
    for (int i = threadIdx.x; i < kTileFloats / 16; i += 256) {
      const int thread = i % kGroup, block = i / kGroup * 4 + lane % 4;
      float4 x[4];
#pragma unroll
      for (int e = 0; e < 4; ++e) x[e] = sums[block * kGroup + (thread & ~3) + e];
      const int row = thread / 32 * 16 + lane / 4;
      const int64_t first = int64_t{w.first + w.n * kRows + row} * a.q_heads + head;
      uint4* to = reinterpret_cast<uint4*>(dq + first * kDim + block * 8);
      const float c = a.scale;
      if (row < valid)
        *to = {pack_bf16(x[0].x * c, x[0].y * c), pack_bf16(x[1].x * c, x[1].y * c),
               pack_bf16(x[2].x * c, x[2].y * c), pack_bf16(x[3].x * c, x[3].y * c)};
      if (row + 8 < valid)
        to[int64_t{a.q_heads} * kDim] = {
            pack_bf16(x[0].z * c, x[0].w * c), pack_bf16(x[1].z * c, x[1].w * c),
            pack_bf16(x[2].z * c, x[2].w * c), pack_bf16(x[3].z * c, x[3].w * c)};
    }
  }
}

}  // namespace

bool packed_backward_available() {
#ifdef HEDDLE_CUDA_SM90A
  int device = 0, major = 0, minor = 0;
  cudaGetDevice(&device);
  cudaDeviceGetAttribute(&major, cudaDevAttrComputeCapabilityMajor, device);
  cudaDeviceGetAttribute(&minor, cudaDevAttrComputeCapabilityMinor, device);
  return major == 9 && minor == 0;
#else
  return false;
#endif
}

void packed_backward(const PackedBackwardShape& shape, const PackedBackwardTensors& t,
                     cudaStream_t stream) {
  const int64_t q_width = shape.q_heads * kDim, k_width = shape.k_heads * kDim;
  const Args a = {tensor_map(t.q, shape.tokens, q_width, q_width, kRows),
                  tensor_map(t.k, shape.tokens, k_width, shape.k_stride, kRows),
                  tensor_map(t.v, shape.tokens, k_width, shape.v_stride, kRows),
                  tensor_map(t.d_o, shape.tokens, q_width, q_width, kRows),
                  t.lse,
                  t.delta,
                  t.cu_seqlens,
                  reinterpret_cast<const int2*>(t.work),
                  t.dq_sum,
                  static_cast<bf16*>(t.dk),
                  static_cast<bf16*>(t.dv),
                  static_cast<int>(shape.q_heads),
                  static_cast<int>(shape.k_heads),
                  static_cast<int>(shape.tiles()),
                  static_cast<float>(shape.scale)};
  const auto entries = static_cast<unsigned>(shape.tiles() * shape.k_heads);
  list_work<<<1, 1024, 0, stream>>>(t.cu_seqlens, static_cast<int>(shape.sequences), a.k_heads,
                                    static_cast<int>(entries), reinterpret_cast<int2*>(t.work));
  const int64_t rows = shape.delta_floats();
  deltas<<<static_cast<unsigned>((rows + 7) / 8), 256, 0, stream>>>(
      static_cast<const uint4*>(t.o), static_cast<const uint4*>(t.d_o), t.delta, rows);
  cudaMemsetAsync(t.dq_sum, 0, static_cast<size_t>(shape.dq_floats()) * sizeof(float), stream);
  cudaFuncSetAttribute(gradients, cudaFuncAttributeMaxDynamicSharedMemorySize, kSharedBytes);
  gradients<<<entries, kThreads, kSharedBytes, stream>>>(a);
  round_dq<<<entries, 256, 0, stream>>>(a, static_cast<bf16*>(t.dq));
  check_launch("packed_backward");
}

}  // namespace heddle::ops::cuda
