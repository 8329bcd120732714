// Low-rank changes of the products: which factors a run of rows has, and what their lows add.
//
// Lows travel as words beside the vectors. Those of products whose output other CTAs read are
// columns of the product's tile, and who reads the output adds B times the low to the columns that
// it reads. The wide products' lows are parts by the CTAs that make the input; the multiplying
// warps add up those of their part of the input and multiply them by B.
#pragma once

#include "ops/cuda/reduce.cuh"
#include "ops/decode_step/cuda/fragments.cuh"
#include "ops/decode_step/cuda/layout.cuh"
#include "ops/grouped_low_rank/cuda/slots.h"

namespace heddle::ops::cuda::decode {

/// A layer's matrices in tables of changes; the first four are those of DecodeStepLayer::inputs.
enum Matrix { kOutput = 4, kGate, kUp, kDown, kMatrices };
static_assert(kMatrices == DecodeStepChanges::kMatrices);

/// Vectors of lows; without changes of their matrices in any layer there are none of them.
enum Group { kOfInputs = 1, kOfAttention = 2, kOfOutput = 4, kOfGated = 8, kOfDown = 16 };

/// Layers whose factors are known at a time: the loading warp is ahead by up to one.
constexpr int kKnownLayers = 4;
/// First column of the lows in the sums of a product.
constexpr int kLowColumn = 64;
constexpr int kMostLows = 16;  ///< Columns of lows that a CTA makes for one product.

/// Findings of the scout, and a place for the mixer's output.
template <int kRows, bool kChanges>
struct ChangesShared {};
template <int kRows>
struct ChangesShared<kRows, true> {
  alignas(16) float mixed[128];                         ///< The mixer's output.
  SlotFactors factors[kKnownLayers][kMatrices][kRows];  ///< By run; rank 0: no change.
  SlotRun runs[kRows];
  int run_of_row[kRows];
};

/// The argument of a kernel with changes, and what stands for it in one without.
template <bool kChanges>
struct ChangesOf {
  struct Type {
    static constexpr int count = 0, rank = 16;
    static constexpr unsigned groups = 0;
  };
};
template <>
struct ChangesOf<true> {
  using Type = DecodeStepChanges;
};

/// Two columns of the lows of a product: ranks 2 `word` and one more of a matrix of a run. Of
/// `words` words, a power of two, for each.
struct LowPair {
  int run, matrix, word;
  __device__ __forceinline__ LowPair(int number, int matrices, int words) {
    word = number & (words - 1);
    const int column = number >> (__ffs(words) - 1);
    run = matrices == 4 ? column / 4 : matrices == 3 ? column / 3 : column / 2;
    matrix = column - run * matrices;
  }
};
/// The pairs that a CTA makes; none where there are no lows of the group.
template <class Changes>
__device__ __forceinline__ Part lows_of(const Changes& changes, unsigned group, int matrices,
                                        int cta) {
  if (!(changes.groups & group)) return {0, 0};
  return part_of(changes.count * matrices * (changes.rank / 2), cta);
}

__device__ __forceinline__ uint4 load_factor16(const void* from) {
  uint4 v;
  asm volatile("ld.global.nc.v4.u32 {%0,%1,%2,%3}, [%4];"
               : "=r"(v.x), "=r"(v.y), "=r"(v.z), "=r"(v.w)
               : "l"(from));
  return v;
}
__device__ __forceinline__ uint2 load_factor8(const void* from) {
  uint2 v;
  asm volatile("ld.global.nc.v2.u32 {%0,%1}, [%2];" : "=r"(v.x), "=r"(v.y) : "l"(from));
  return v;
}
__device__ __forceinline__ u32 load_factor4(const void* from) {
  u32 v;
  asm volatile("ld.global.nc.u32 %0, [%1];" : "=r"(v) : "l"(from));
  return v;
}
__device__ __forceinline__ u32 load_factor2(const void* from) {
  u32 v;
  asm volatile("{.reg .u16 t; ld.global.nc.u16 t, [%1]; cvt.u32.u16 %0, t;}" : "=r"(v) : "l"(from));
  return v;
}

/// Whether all rows of B begin on 16 bytes.
__device__ __forceinline__ bool has_whole_rows(const SlotFactors& f) { return f.rank % 8 == 0; }

/// Ranks `first` to `first` + 15 of a row of B, zeros beyond the rank, and all zeros without whole
/// rows. Asked for here: a compiler that put the loads after a look for words would put them into
/// the chain. Zeros too where they are not wanted: what is given a value on some ways only takes
/// registers from the beginning of the kernel on.
__device__ __forceinline__ void load_ranks(u32 (&v)[8], const SlotFactors& f, int row, int first,
                                           bool is_wanted = true) {
  const int left = is_wanted && has_whole_rows(f) ? f.rank - first : 0;
  const bf16* const from =
      static_cast<const bf16*>(f.b) + static_cast<int64_t>(row) * f.rank + first;
#pragma unroll
  for (int i = 0; i < 8; i += 4) {
    const uint4 four = 2 * i < left ? load_factor16(from + 2 * i) : make_uint4(0, 0, 0, 0);
    v[i] = four.x, v[i + 1] = four.y, v[i + 2] = four.z, v[i + 3] = four.w;
  }
}
/// Ranks `first` to `first` + 3, of any rank.
__device__ __forceinline__ void load_ranks(u32 (&v)[2], const SlotFactors& f, int row, int first) {
  const int left = f.rank - first;
  const bf16* const from =
      static_cast<const bf16*>(f.b) + static_cast<int64_t>(row) * f.rank + first;
  v[0] = v[1] = 0;
  if (f.rank % 4 == 0) {
    if (left <= 0) return;
    const uint2 pair = load_factor8(from);
    v[0] = pair.x, v[1] = pair.y;
    return;
  }
#pragma unroll
  for (int i = 0; i < 4; ++i) {
    if (i < left) v[i / 2] |= load_factor2(from + i) << i % 2 * 16;
  }
}

/// A column's change by lows, read again, where rows of B are not whole: slow and short.
__device__ __forceinline__ float slow_change(const SlotFactors& f, int row, const u32* lows) {
  float sum = 0;
  const bf16* const from = static_cast<const bf16*>(f.b) + static_cast<int64_t>(row) * f.rank;
#pragma unroll 1
  for (int i = 0; i < f.rank; ++i) {
    u32 low;
    load_words(low, lows + i / 2);
    clear(low);
    sum += __bfloat162float(from[i]) * (i % 2 ? bf16_hi(low) : bf16_lo(low));
  }
  return sum;
}

/// The change by 16 ranks.
__device__ __forceinline__ float dot(const u32 (&b)[8], const uint4& lo, const uint4& hi) {
  const u32 low[8] = {lo.x, lo.y, lo.z, lo.w, hi.x, hi.y, hi.z, hi.w};
  float even = 0, odd = 0;
#pragma unroll
  for (int i = 0; i < 8; ++i) {
    even += bf16_lo(b[i]) * bf16_lo(low[i]);
    odd += bf16_hi(b[i]) * bf16_hi(low[i]);
  }
  return even + odd;
}

/// B of two neighbouring columns, and what they get from lows.
struct ColumnPair {
  u32 b[2][8];
  __device__ __forceinline__ void load(const SlotFactors& f, int column, int first,
                                       bool is_wanted = true) {
    load_ranks(b[0], f, column, first, is_wanted);
    load_ranks(b[1], f, column + 1, first, is_wanted);
  }
  __device__ __forceinline__ void add(float2& sums, const uint4& lo, const uint4& hi) const {
    sums.x += dot(b[0], lo, hi), sums.y += dot(b[1], lo, hi);
  }
  /// Where the pair of rows of B is not whole, after the lows have been awaited.
  static __device__ __forceinline__ void add_slowly(float2& sums, const SlotFactors& f, int column,
                                                    const u32* lows) {
    if (has_whole_rows(f)) return;
#pragma unroll 1
    for (int i = 0; i < 2; ++i) (i == 0 ? sums.x : sums.y) += slow_change(f, column + i, lows);
  }
};

/// A mixer's columns' part of the lows of the output product: a group of lanes has two ranks, a
/// lane four columns.
template <int kRows>
struct MixerLows {
  static constexpr int kLanes = MixerPart<kRows>::kColumns / 4, kGroups = kThreads / kLanes;
  const bf16* a;  ///< The lane's columns.
  int rank, group;
  float scale;
  uint2 first[2];

  __device__ __forceinline__ void begin(const SlotFactors& f, int column, int thread) {
    a = static_cast<const bf16*>(f.a) + column + thread % kLanes * 4;
    rank = f.rank, scale = f.scale;
    group = thread / kLanes;
    load(first, group);
  }
  __device__ __forceinline__ void load(uint2 (&v)[2], int word) const {
#pragma unroll
    for (int i = 0; i < 2; ++i)
      v[i] = 2 * word + i < rank ? load_factor8(a + (2 * word + i) * kMixer) : make_uint2(0, 0);
  }
  /// note(x) of each before it becomes a word.
  template <class Note>
  __device__ __forceinline__ void write(const float (&o)[4], u32* to, int words, int thread,
                                        u32 round, const Note& note) {
#pragma unroll 1
    for (int word = group; word < words; word += kGroups) {
      if (word != group) load(first, word);
      float sums[2];
#pragma unroll
      for (int i = 0; i < 2; ++i) {
        const uint2 v = first[i];
        sums[i] = (o[0] * bf16_lo(v.x) + o[1] * bf16_hi(v.x)) +
                  (o[2] * bf16_lo(v.y) + o[3] * bf16_hi(v.y));
        sums[i] = lane_sum<kLanes>(sums[i]) * scale;
      }
      if (thread % kLanes == 0) {
        note(sums[0]), note(sums[1]);
        store_word(to + word, make_word(sums[0], sums[1], round));
      }
    }
  }
};

/// Sums over the parts of a row of columns [part][row] of a product: rows 2t and 2t + 1 are right
/// in the lanes that have them.
template <int kRows>
__device__ __forceinline__ void fold_parts(const float (&d)[4], float (&rows)[2]) {
  rows[0] += [&] {
    float v = kRows == 1 ? d[0] + d[1] : d[0];
    if (kRows <= 2) v += __shfl_xor_sync(~0u, v, 1);
    if (kRows <= 4) v += __shfl_xor_sync(~0u, v, 2);
    return v;
  }();
  if (kRows == 1) return;
  rows[1] += [&] {
    float v = d[1];
    if (kRows <= 2) v += __shfl_xor_sync(~0u, v, 1);
    if (kRows <= 4) v += __shfl_xor_sync(~0u, v, 2);
    return v;
  }();
}

}  // namespace heddle::ops::cuda::decode
