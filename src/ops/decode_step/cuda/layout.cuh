// Columns and sequences that a CTA of a step has, and the memory that CTAs meet in.
#pragma once

#include "ops/decode_step/cuda/decode_step.h"
#include "ops/decode_step/cuda/words.cuh"

namespace heddle::ops::cuda::decode {

using Shape = DecodeStepShape;

constexpr int kCtas = Shape::kCtas;
constexpr int kWarps = 8, kThreads = 32 * kWarps;

constexpr int kWidth = Shape::kWidth, kInner = Shape::kInner;
constexpr int kMixer = Shape::kDeltaHeads * Shape::kDeltaHeadDim;  ///< Input of the output product.
static_assert(kMixer == Shape::kHeads * Shape::kHeadDim);
constexpr int kChannels = 3 * kMixer;
constexpr int kDeltaInputs = 4 * kMixer + 2 * Shape::kDeltaHeads;
constexpr int kKeys = Shape::kKeyHeads * Shape::kHeadDim;
constexpr int kAttentionInputs = 2 * kMixer + 2 * kKeys;
constexpr int kGroup = Shape::kHeads / Shape::kKeyHeads;  ///< Query heads of a key head.
constexpr int kWideCtas = kWidth / 8;  ///< CTAs with 8 columns of the residual and a mixer.

/// First word and words of a CTA's columns of a vector of `words` words.
struct Part {
  int first, count;
};
__device__ __forceinline__ Part part_of(int words, int cta) {
  const int each = words / kCtas, more = words % kCtas;
  return {cta * each + min(cta, more), each + (cta < more ? 1 : 0)};
}

/// The columns of the mixer's output that a CTA makes: 16 of each head for 1 row, the whole head of
/// one row for 8.
template <int kRows>
struct MixerPart {
  static constexpr int kParts = 8 / kRows;  ///< CTAs of one head of one row.
  static constexpr int kColumns = 16 * kRows;
  int head, row, part;  ///< Head of 128 columns.
  __device__ __forceinline__ explicit MixerPart(int cta)
      : head(cta / 8), row(cta % 8 % kRows), part(cta % 8 / kRows) {}
  __device__ __forceinline__ int column() const { return head * 128 + part * kColumns; }
  /// Place in Exchange::low_mixed.
  __device__ __forceinline__ int place() const { return head * 8 + part * kRows + row; }
};

/// The keys of one row and key head that a CTA attends to.
template <int kRows>
struct KeyPart {
  static constexpr int kParts = kWideCtas / Shape::kKeyHeads / kRows;
  /// Fewer keys are not worth another part.
  static constexpr int kFewest = 16;
  int head, row, part;
  __device__ __forceinline__ explicit KeyPart(int cta)
      : head(cta / (kWideCtas / Shape::kKeyHeads)),
        row(cta % (kWideCtas / Shape::kKeyHeads) % kRows),
        part(cta % (kWideCtas / Shape::kKeyHeads) / kRows) {}
  /// Keys of a part where there are `total`.
  static __device__ __forceinline__ int keys_of(int total) {
    return max(kFewest, (div_up(total, kParts) + 7) & ~7);
  }
  /// Parts that have keys.
  static __device__ __forceinline__ int parts_of(int total) {
    return div_up(total, keys_of(total));
  }

 private:
  /// Without a sign: a division by a power of two is a shift.
  static __device__ __forceinline__ int div_up(unsigned total, unsigned each) {
    return static_cast<int>((total + each - 1) / each);
  }
};

/// Where the keys of a row and a head lie, from element `element` of the head on.
struct KeyPlaces {
  const int* table;
  int shift, head, element;
  __device__ __forceinline__ KeyPlaces(const DecodeStepRows& rows, int row, int head, int element)
      : table(rows.pages + static_cast<int64_t>(row) * rows.table_pages),
        head(head),
        element(element) {
    shift = __ffs(rows.page_tokens) - 1;
  }
  __device__ __forceinline__ int64_t operator()(int key) const {
    const int64_t page = __ldg(table + (key >> shift));
    return (((page << shift) + (key & ((1 << shift) - 1))) * Shape::kKeyHeads + head) *
               Shape::kHeadDim +
           element;
  }
};

/// Copies of the lows that all CTAs read whole, times the rows, against looks of all warps of all
/// CTAs at one place. They were not what made steps slow: one copy took as long.
constexpr int kLowCopies = 8;

/// Vectors between CTAs, [row][words] unless said otherwise, see words.cuh.
struct Exchange {
  u32* step;                ///< Steps so far.
  u32 *inputs, *attention;  ///< Inputs of the mixers.
  u32 *mixed, *middle, *inner, *residual;
  u32* squares;  ///< Floats [row][head][8]: of the delta rule's outputs, by CTA.
  u32* outputs;  ///< Floats [row][key head][part][query head][head_dim]: attention, not divided.
  u32* sums;     ///< Floats [row][key head][part][query head][2]: largest score, sum.
  // Lows of changes, rank / 2 words each. By matrix: inputs of the mixers, gate and up.
  u32 *low_inputs, *low_attention;  ///< [copy][row][4]
  u32* low_gated;                   ///< [copy][row][2]
  // Shares of the lows by columns of the wide products' inputs, of 16 ranks after 16 others.
  u32* low_mixed;  ///< [step of ranks][head of 128][part][row][8]
  u32* low_inner;  ///< [step of ranks][CTA][row][8]

  static constexpr int64_t kEach = kDeltaInputs / 2 + kAttentionInputs / 2 + kMixer / 2 +
                                   kWidth / 2 + kInner / 2 + kWidth / 2 + Shape::kDeltaHeads * 8;
  static constexpr int64_t kKeyParts = int64_t{kWideCtas} * kGroup;
  static constexpr int64_t kLow = DecodeStepChanges::kMostRank / 2;
  static constexpr int64_t kLows =
      kLow * (kLowCopies * 10 + Shape::kDeltaHeads * 8 + kCtas * Shape::kMostRows);
  static constexpr int64_t kWords =
      kDecodeStepHead + Shape::kMostRows * kEach + kKeyParts * (Shape::kHeadDim + 2) + kLows;

  __host__ __device__ explicit Exchange(u32* words) : step(words) {
    u32* at = words + kDecodeStepHead;
    const auto take = [&](int64_t count) {
      u32* const from = at;
      at += count;
      return from;
    };
    constexpr int64_t kRows = Shape::kMostRows;
    inputs = take(kRows * kDeltaInputs / 2);
    attention = take(kRows * kAttentionInputs / 2);
    mixed = take(kRows * kMixer / 2);
    middle = take(kRows * kWidth / 2);
    inner = take(kRows * kInner / 2);
    residual = take(kRows * kWidth / 2);
    squares = take(kRows * Shape::kDeltaHeads * 8);
    outputs = take(kKeyParts * Shape::kHeadDim);
    sums = take(kKeyParts * 2);
    low_inputs = take(kLowCopies * 4 * kLow);
    low_attention = take(kLowCopies * 4 * kLow);
    low_gated = take(kLowCopies * 2 * kLow);
    low_mixed = take(int64_t{Shape::kDeltaHeads} * 8 * kLow);
    low_inner = take(kCtas * kRows * kLow);
  }
};

/// The lowest bits of the rounds of a layer's vectors, in one register.
struct Rounds {
  u32 bits;
  /// Inputs of its kind of mixer, their lows, and what it hands on.
  __device__ __forceinline__ u32 kind() const { return bits & 1; }
  /// `mixed`, `middle` and `inner`, and all other lows.
  __device__ __forceinline__ u32 layer() const { return bits >> 1 & 1; }
  __device__ __forceinline__ u32 residual() const { return bits >> 2 & 1; }
};

}  // namespace heddle::ops::cuda::decode
