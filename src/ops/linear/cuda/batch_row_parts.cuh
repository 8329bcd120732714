// Stages of the products of a batch's rows (batch_rows.cu says how the launch goes): the warps that
// load, scale and multiply.
#pragma once

#include "ops/linear/cuda/batch_row_layout.cuh"

namespace heddle::ops::cuda::batch_row {

#if defined(__CUDA_ARCH_FEAT_SM90_ALL)

/// One thread asks for all bytes.
template <int kRows, int kGroups, Changes kChanges>
__device__ __forceinline__ void load(const Work& work,
                                     const Ring<kRows, kGroups, kChanges>& ring) {
  using L = Layout<kRows, kGroups, kChanges>;
  const auto load_matrix = [&](int i) {
    const int depth = (work.begin + i) * kDepth;
    mbar_expect(ring.full(i), L::kStageBytes);
    bulk_load_box(ring.matrix(i), &work.p.maps[work.p.map_of[work.which]], depth, work.first,
                  ring.full(i));
    if (work.is_gated())
      bulk_load_box(ring.matrix(i) + kGroups * kMatrixBytes / 2,
                    &work.p.maps[work.p.map_of[work.which] + 1], depth, work.first, ring.full(i));
  };
  const auto load_rows = [&](int i) {
    bulk_load_box(ring.rows(i), &work.p.rows_map, (work.begin + i) * kDepth, 0, ring.full(i));
  };
  const int early = min(work.steps, L::kStages);
  for (int i = 0; i < early; ++i) load_matrix(i);
  wait_for_previous();
  for (int i = 0; i < early; ++i) load_rows(i);
  for (int i = early; i < work.steps; ++i) {
    mbar_wait(ring.empty(i), ring.phase(i) ^ 1);
    load_matrix(i);
    load_rows(i);
  }
}

/// The norm's weights of a lane's 8 places of a block, on their way a block ahead: a load from
/// memory takes longer than the rest of a block.
struct NormWeights {
  uint4 bits[2];

  __device__ __forceinline__ void fetch(const Work& work, int i, int place) {
    const FewRowNorm& norm = work.few.norm;
    const int column = (work.begin + i) * kDepth + place;
    bits[0] = bits[1] = {0, 0, 0, 0};
    if (i >= work.steps || column >= work.few.depth) return;
    const bool is_half = norm.weight_type == Element::kBFloat16;
    const uint4* const from = reinterpret_cast<const uint4*>(
        static_cast<const unsigned char*>(norm.weight) + column * (is_half ? 2 : 4));
    bits[0] = __ldg(from);
    if (!is_half) bits[1] = __ldg(from + 1);
  }
  /// Offset and weights.
  __device__ __forceinline__ void read(const FewRowNorm& norm, float (&x)[8]) const {
    if (norm.weight_type == Element::kBFloat16) {
      unpack(FewRowVector{{bits[0].x, bits[0].y, bits[0].z, bits[0].w}}, x);
    } else {
      const u32 words[8] = {bits[0].x, bits[0].y, bits[0].z, bits[0].w,
                            bits[1].x, bits[1].y, bits[1].z, bits[1].w};
#pragma unroll
      for (int e = 0; e < 8; ++e) x[e] = __uint_as_float(words[e]);
    }
#pragma unroll
    for (int e = 0; e < 8; ++e) x[e] += norm.offset;
  }
};

/// A warp's half of the rows of every second block, times the norm's weight. A lane has 8 elements
/// of every fourth of these rows.
template <int kRows, int kGroups, Changes kChanges>
__device__ __forceinline__ void scale(const Work& work,
                                      const Ring<kRows, kGroups, kChanges>& ring,
                                      float* squares) {
  constexpr int kOwn = kRows / 2, kVectors = kOwn / 4;
  const FewRowNorm& norm = work.few.norm;
  const int scaler = static_cast<int>(threadIdx.x) / 32 - kGroups * 4, lane = threadIdx.x % 32,
            place = lane % 8 * 8, line = scaler % 2 * kOwn + lane / 8;
  float square[kVectors] = {};
  NormWeights next;
  next.fetch(work, scaler / 2, place);
  for (int i = scaler / 2; i < work.steps; i += 2) {
    float weight[8];
    next.read(norm, weight);
    next.fetch(work, i + 2, place);
    // A barrier tells only one use of its stage from the next, so each has to be seen.
    if (Ring<kRows, kGroups, kChanges>::L::kStages % 2 != 0 && i > 0)
      mbar_wait(ring.full(i - 1), ring.phase(i - 1));
    mbar_wait(ring.full(i), ring.phase(i));
#pragma unroll
    for (int j = 0; j < kVectors; ++j) {
      const u32 at = tile_address(ring.rows(i), kRows, line + j * 4, place);
      const uint4 bits = ld_shared16(at);
      FewRowVector v{{bits.x, bits.y, bits.z, bits.w}};
      float x[8];
      unpack(v, x);
#pragma unroll
      for (int e = 0; e < 8; ++e) square[j] += x[e] * x[e], x[e] *= weight[e];
      v = pack<bf16>(x);
      asm volatile("st.shared.v4.u32 [%0], {%1, %2, %3, %4};" ::"r"(at), "r"(v.words[0]),
                   "r"(v.words[1]), "r"(v.words[2]), "r"(v.words[3])
                   : "memory");
    }
    fence_async_proxy();
    __syncwarp();
    if (lane == 0) mbar_arrive(ring.scaled(i));
  }
#pragma unroll
  for (int j = 0; j < kVectors; ++j) {
    float sum = square[j];
#pragma unroll
    for (int step = 1; step < 8; step *= 2) sum += __shfl_xor_sync(0xffffffffu, sum, step);
    if (lane % 8 == 0) squares[scaler / 2 * kRows + line + j * 4] = sum;
  }
}

/// A lane's part of B for the columns of a multiplying warp, of the set that all rows share:
/// columns g and g + 8 of its 16.
struct SetFactor {
  uint2 b[2];

  template <int kColumns>
  static __device__ __forceinline__ SetFactor of(const Work& work) {
    const int warp = static_cast<int>(threadIdx.x) / 32, lane = threadIdx.x % 32,
              half = work.is_gated() ? kColumns / 2 : kColumns, layer = warp * 16 / half,
              column = work.first + warp * 16 - layer * half + lane / 4;
    const few_row::RunOfChange set = few_row::only_set(work.few, work.change(layer));
    SetFactor own;
#pragma unroll
    for (int c = 0; c < 2; ++c)
      own.b[c] = load_factor4(set.b + (column + 8 * c) * set.b_stride, lane % 4 * 4, set.rank,
                              column + 8 * c < work.sum.columns);
    return own;
  }
  /// Goes on with the sums of a warp; `lows` [kRows, kLowColumns] of its layer.
  template <int kRows>
  __device__ __forceinline__ void add_change(float (&acc)[kRows / 8][4], u32 lows) const {
    const int lane = threadIdx.x % 32;
    const u32 columns[4] = {b[0].x, b[1].x, b[0].y, b[1].y},
              from = lows + lane / 4 * (kLowColumns * 2) + lane % 4 * 8;
#pragma unroll
    for (int n = 0; n < kRows / 8; ++n) {
      uint2 x;
      asm volatile("ld.shared.v2.u32 {%0, %1}, [%2];"
                   : "=r"(x.x), "=r"(x.y)
                   : "r"(from + n * 8 * (kLowColumns * 2))
                   : "memory");
      mma_bf16(acc[n], columns, x.x, x.y);
    }
  }
};

/// The products of the CTA's blocks of the depth, to `sums` [kRows, kPitch].
template <int kRows, int kGroups, Changes kChanges>
__device__ __forceinline__ void multiply(const Work& work,
                                         const Ring<kRows, kGroups, kChanges>& ring,
                                         float* sums) {
  using L = Layout<kRows, kGroups, kChanges>;
  const int group = threadIdx.x / 128, warp = threadIdx.x / 32 % 4, lane = threadIdx.x % 32;
  constexpr bool kHasSet = L::kIsChanged && !L::kHasRuns;
  SetFactor factor{};
  if constexpr (kHasSet) factor = SetFactor::of<L::kColumns>(work);
  wait_for_previous();
  float acc[kRows / 8][4];
  for (int i = 0; i < work.steps; ++i) {
    mbar_wait(ring.full(i), ring.phase(i));
    if (work.is_normed()) mbar_wait(ring.scaled(i), ring.phase(i));
    const u64 a = make_descriptor(ring.matrix(i) + group * kMatrixBytes),
              b = make_descriptor(ring.rows(i));
    MmaHopper::fence();
#pragma unroll
    for (int k = 0; k < kDepth / 16; ++k)
      wgmma_ss<0, 0>(acc, a + ((k * 32) >> 4), b + ((k * 32) >> 4), i > 0 || k > 0);
    MmaHopper::commit();
    MmaHopper::wait<1>();
    if (i > 0 && lane == 0) mbar_arrive(ring.empty(i - 1));
  }
  MmaHopper::wait<0>();
  pin(acc);
  named_sync(1, L::kMeeting);  // all have read the ring, in whose place the sums lie
  if constexpr (kHasSet)
    factor.add_change<kRows>(acc, ring.factor(0, L::kIsGated ? (group * 4 + warp) * 32 / L::kColumns : 0));
#pragma unroll
  for (int n = 0; n < kRows / 8; ++n) {
#pragma unroll
    for (int i = 0; i < 4; ++i)
      sums[(n * 8 + lane % 4 * 2 + i % 2) * L::kPitch + group * kGroupColumns + warp * 16 +
           lane / 4 + i / 2 * 8] = acc[n][i];
  }
}

#endif

}  // namespace heddle::ops::cuda::batch_row
