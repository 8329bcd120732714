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
  /// B of the CTA's columns of the next wide product, [run][column][rank / 2].
  alignas(8) u32 wide[kRows * 8 * DecodeStepChanges::kMostRank / 2];
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

/// Whether all rows of B begin on 8 bytes.
__device__ __forceinline__ bool has_whole_rows(const SlotFactors& f) { return f.rank % 4 == 0; }

/// Ranks `first` to `first` + 3 of a row of B, zeros beyond the rank, and all zeros without whole
/// rows or where they are not wanted.
__device__ __forceinline__ uint2 load_ranks(const SlotFactors& f, int row, int first,
                                            bool is_wanted = true) {
  const int left = is_wanted && has_whole_rows(f) ? f.rank - first : 0;
  return left > 0 ? load_factor8(static_cast<const bf16*>(f.b) +
                                 static_cast<int64_t>(row) * f.rank + first)
                  : make_uint2(0, 0);
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

/// Products of 16 columns with lows: a lane's four of 16 ranks of columns g and g + 8, and of the
/// lows of row g. Ranks are in another order than those of a fragment, in both alike.
__device__ __forceinline__ void add_changes(float (&c)[4], const uint2& first, const uint2& second,
                                            const uint2& low) {
  mma(c, first.x, second.x, first.y, second.y, low.x, low.y);
}

/// Changes of neighbouring columns of a warp by the lows of one row, kTiles / 2 columns a lane.
template <int kTiles>
struct WarpChanges {
  uint2 b[kTiles][2];

  /// `count` columns from `column` on, and the 16 ranks from `first` on.
  __device__ __forceinline__ void load(const SlotFactors& f, int column, int count, int first,
                                       int g, int t) {
    // Zeros where they are not wanted: what is given a value on some ways only takes registers from
    // the beginning of the kernel on.
#pragma unroll
    for (int j = 0; j < kTiles; ++j) b[j][0] = b[j][1] = make_uint2(0, 0);
    const int rank = f.rank, own = 2 * kTiles * g, at = first + 4 * t;
    if (own >= count || at >= rank || !has_whole_rows(f)) return;
    const auto* const from = static_cast<const char*>(f.b) + 2 * ((column + own) * rank + at);
    // The offsets of neighbouring rows in 64 bits: one instruction each.
    const auto row = static_cast<u64>(static_cast<u32>(rank));
#pragma unroll
    for (int i = 0; i < 2 * kTiles; ++i) {
      if (kTiles == 4 || own + i < count) b[i / 2][i % 2] = load_factor8(from + row * (2 * i));
    }
  }
  /// Adds to the lane's two columns what the lows of these ranks add.
  __device__ __forceinline__ void add(float2& sums, const uint2& low, int t) const {
    static_assert(kTiles == 4);
    float2 own = make_float2(0, 0);
#pragma unroll
    for (int j = 0; j < kTiles; ++j) {
      float c[4] = {};
      add_changes(c, b[j][0], b[j][1], low);
      if (t == j) own = make_float2(c[0], c[2]);
    }
    sums.x += own.x, sums.y += own.y;
  }
  /// Adds to the lane's one column likewise.
  __device__ __forceinline__ void add(float& sum, const uint2& low, int t) const {
    static_assert(kTiles == 2);
    float c[2][4] = {};
#pragma unroll
    for (int j = 0; j < kTiles; ++j) add_changes(c[j], b[j][0], b[j][1], low);
    const float even = t < 2 ? c[0][0] : c[1][0], odd = t < 2 ? c[0][2] : c[1][2];
    sum += t % 2 ? odd : even;
  }
};

/// Columns of the parts of the lows of the output and of the down product.
constexpr int kMixedLows = Shape::kDeltaHeads * 8;
template <int kRows>
constexpr int kInnerLows = kCtas* kRows;
/// Place of ranks 2 `word` and one more of one of `columns`.
__device__ __forceinline__ int part_place(int columns, int column, int word) {
  return (word / 8 * columns + column) * 8 + word % 8;
}

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
  /// Into one of the columns of `to`; note(x) of each before it becomes a word.
  template <class Note>
  __device__ __forceinline__ void write(const float (&o)[4], u32* to, int column, int words,
                                        int thread, u32 round, const Note& note) {
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
        store_word(to + part_place(kMixedLows, column, word), make_word(sums[0], sums[1], round));
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
