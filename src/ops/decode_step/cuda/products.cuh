// The multiplying warps of a CTA: products with the CTA's columns of a matrix.
//
// Warp w has 128 of each 1024 of the depth, for all columns, so that its part of the input is read
// once. Weights are in registers before the input is looked for, with changes not all of them. The
// warps' sums meet in shared memory.
#pragma once

#include "ops/decode_step/cuda/fragments.cuh"
#include "ops/decode_step/cuda/loader.cuh"

namespace heddle::ops::cuda::decode {

/// The lows that go with a product: of a group, of `matrices` matrices from `first` on.
struct LowsToMake {
  u32* to;  ///< [copy][row][matrices]
  unsigned group;
  int first, matrices;
  u32 round;
};

template <int kRows, bool kChanges>
struct Multiplier {
  static constexpr int kMostRows = kRows;
  static constexpr int kBlocks = 32 / kWarps;  ///< Blocks of 32 of the depth, of a slot.
  static constexpr int kPitchOfRows = kRowPitch<kRows, kChanges>;
  static constexpr int kWidePitch = 12;

  Shared<kRows, kChanges>& shared;
  Ring ring;
  float offset, eps;  ///< Parameters of the norms.
  int cta, thread, warp, lane, g, t;
  const typename ChangesOf<kChanges>::Type& changes;
  int layer = 0;
  int turn = 0;  ///< Number of the sums' copy.
  /// Rows of which this thread met a number that is not finite or does not fit into a word, a bit
  /// each.
  u32 lost = 0;

  __device__ __forceinline__ void sync() const { named_sync(1, kThreads); }
  /// Before `x` of the row becomes a word.
  __device__ __forceinline__ void note(int row, float x) {
    lost |= static_cast<u32>(!(fabsf(x) <= kLargest)) << row;
  }

  /// This lane's parts of the next slot's row g: blocks of 32, of which it has 8 numbers. Returns
  /// the slot, for `release`.
  template <int N>
  __device__ __forceinline__ int take(uint4 (&w)[N]) {
    const int slot = ring.slot;
    guarded_wait(ring.full + 8 * slot, ring.phase);
    const u32 row = ring.base + slot * kSlotBytes + g * kPitch + (warp * N * 32 + 8 * t) * 2;
#pragma unroll
    for (int i = 0; i < N; ++i) w[i] = ld_shared16(row + i * 64);
    ring.next();
    return slot;
  }
  /// Gives the slot back once `w`, taken from it, is in registers: an arrival can overtake loads
  /// that wait behind other warps' looks, and the next copy is not ordered with them. The vote
  /// needs a register of each load; no weights are all such NaN.
  template <int N>
  __device__ __forceinline__ void release(int slot, const uint4* w) {
    u32 all = w[0].w;
#pragma unroll
    for (int i = 1; i < N; ++i) all &= w[i].w;
    if (__ballot_sync(~0u, all == 0xffffffffu)) __nanosleep(20);
    __syncwarp();  // a vote orders no memory
    if (lane == 0) mbar_arrive(ring.empty + 8 * slot);
  }

  /// Row g of a vector of `words`, this warp's part of each 1024 of the depth.
  template <int N>
  __device__ __forceinline__ void rows(uint4 (&x)[N], const u32* vector, int words, u32 round) {
#pragma unroll
    for (int i = 0; i < N; ++i) x[i] = make_uint4(0, 0, 0, 0);
    if (g < kRows) {
      const u32* row = vector + g * words + 4 * t;
      await_words(x, row, round, [&](int i) {
        const int slot = i / kBlocks,
                  per = (slot + 1) * kBlocks <= N ? kBlocks : N - slot * kBlocks;
        return slot * 512 + (warp * per + i % kBlocks) * 16;
      });
    }
    __syncwarp();
  }

  /// x times the norm's weights, in bf16; what is left of the norm is a factor of the row, whose
  /// squares meet with the sums.
  __device__ __forceinline__ void scale(uint4 (&x)[kBlocks], const uint4 (&weights)[kBlocks]) {
    float squares = 0;
    const auto pair = [&](u32& v, u32 w) {
      const float lo = bf16_lo(v) * kRead, hi = bf16_hi(v) * kRead;
      squares += lo * lo + hi * hi;
      v = pack_bf16(lo * (offset + bf16_lo(w)), hi * (offset + bf16_hi(w)));
    };
#pragma unroll
    for (int i = 0; i < kBlocks; ++i) {
      pair(x[i].x, weights[i].x), pair(x[i].y, weights[i].y);
      pair(x[i].z, weights[i].z), pair(x[i].w, weights[i].w);
    }
    squares += __shfl_xor_sync(~0u, squares, 1);
    squares += __shfl_xor_sync(~0u, squares, 2);
    if (g < kRows && t == 0) shared.squares[turn & 1][warp][g] = squares;
  }
  __device__ __forceinline__ float factor(int row) const {
    float squares = 0;
#pragma unroll
    for (int w = 0; w < kWarps; ++w) squares += shared.squares[turn & 1][w][row];
    // NaN where the sum is infinite, whose root would be 0.
    return rsqrtf(squares / kWidth + eps) + (squares - squares);
  }
  __device__ __forceinline__ void norm(uint4 (&weights)[kBlocks], const void* norm) const {
#pragma unroll
    for (int i = 0; i < kBlocks; ++i)
      weights[i] = __ldg(static_cast<const uint4*>(norm) + (warp * kBlocks + i) * 4 + t);
  }

  __device__ __forceinline__ float* sums(int w) const {
    return shared.sums[turn % kSums<kRows>][w];
  }
  /// Sums of column `column` of this warp's part of the depth, for rows 2t and 2t + 1.
  __device__ __forceinline__ void put(int column, float a, float b, int pitch) {
    float* to = sums(warp) + column;
    if constexpr (kRows == 1) {
      if (t == 0) *to = a;
    } else {
      if (2 * t < kRows) to[2 * t * pitch] = a;
      if (2 * t + 1 < kRows) to[(2 * t + 1) * pitch] = b;
    }
  }
  __device__ __forceinline__ float sum(int row, int column, int pitch = kPitchOfRows) const {
    float s[4] = {};
#pragma unroll
    for (int w = 0; w < kWarps; ++w) s[w % 4] += sums(w)[row * pitch + column];
    return (s[0] + s[1]) + (s[2] + s[3]);
  }
  /// After the sums were read.
  __device__ __forceinline__ void end() {
    ++turn;
    if constexpr (kSums<kRows> == 1) sync();
  }

  /// Weights of 8 columns a slot, slots kFrom to kTo - 1 of `slots`, which are at least kFewest; of
  /// slots that are not there zeros.
  template <int kFrom, int kTo, int kFewest>
  __device__ __forceinline__ void take_columns(uint4 (&w)[8][kBlocks], int slots) {
    int slot = 0;
#pragma unroll
    for (int s = kFrom; s < kTo; ++s) {
      const int before = slot;
      if (s < kFewest || s < slots) {
        slot = take(w[s]);
        if (s > kFrom) release<kBlocks>(before, w[s > 0 ? s - 1 : 0]);
        if (s + 1 == kTo) release<kBlocks>(slot, w[s]);
      } else {
        if (s > kFrom && s == slots) release<kBlocks>(before, w[s > 0 ? s - 1 : 0]);
#pragma unroll
        for (int i = 0; i < kBlocks; ++i) w[s][i] = make_uint4(0, 0, 0, 0);
      }
    }
  }
  template <int S>
  __device__ __forceinline__ void multiply(const uint4 (&w)[S][kBlocks],
                                           const uint4 (&x)[kBlocks]) {
    put_products(w, x);
    sync();
  }
  template <int S>
  __device__ __forceinline__ void put_products(const uint4 (&w)[S][kBlocks],
                                               const uint4 (&x)[kBlocks]) {
    constexpr int T = (S + 1) / 2;
    float c[T][4] = {};
#pragma unroll
    for (int i = 0; i < kBlocks; ++i) {
#pragma unroll
      for (int half = 0; half < 2; ++half) {
#pragma unroll
        for (int s = 0; s < T; ++s) {
          const uint4 lo = w[2 * s][i];
          const uint4 hi =
              2 * s + 1 < S ? w[2 * s + 1 < S ? 2 * s + 1 : 0][i] : make_uint4(0, 0, 0, 0);
          if (half == 0)
            mma(c[s], lo.x, hi.x, lo.y, hi.y, x[i].x, x[i].y);
          else
            mma(c[s], lo.z, hi.z, lo.w, hi.w, x[i].z, x[i].w);
        }
      }
    }
#pragma unroll
    for (int s = 0; s < T; ++s) {
      put(16 * s + g, c[s][0], c[s][1], kPitchOfRows);
      put(16 * s + 8 + g, c[s][2], c[s][3], kPitchOfRows);
    }
  }

  /// Whether there are lows of the group.
  __device__ __forceinline__ bool has(unsigned group) const { return changes.groups & group; }
  // With changes:
  /// The factors of a matrix of this layer by run.
  __device__ __forceinline__ const SlotFactors& factors(int matrix, int run) const {
    if constexpr (kChanges)
      return shared.changes.factors[layer % kKnownLayers][matrix][run];
    else
      return *reinterpret_cast<const SlotFactors*>(&shared);
  }
  __device__ __forceinline__ int run_of(int row) const {
    if constexpr (kChanges)
      return shared.changes.run_of_row[row];
    else
      return 0;
  }

  /// Products with 8 rows of A, number `s` of this product's, put beside the others.
  __device__ __forceinline__ void put_lows(int s, const uint4 (&a)[kBlocks],
                                           const uint4 (&x)[kBlocks]) {
    float c[2][4] = {};
#pragma unroll
    for (int i = 0; i < kBlocks; ++i) {
      mma(c[0], a[i].x, 0, a[i].y, 0, x[i].x, x[i].y);
      mma(c[1], a[i].z, 0, a[i].w, 0, x[i].z, x[i].w);
    }
    put(kLowColumn + 8 * s + g, c[0][0] + c[1][0], c[0][1] + c[1][1], kPitchOfRows);
  }
  /// The row's lows of `matrices` matrices.
  __device__ __forceinline__ u32* lows_at(u32* lows, int copy, int row, int matrices) const {
    return lows + (copy * kRows + row) * (matrices == 2 ? 2 : 4) * (changes.rank / 2);
  }
  /// In the copy that this CTA reads.
  __device__ __forceinline__ const u32* own_lows(u32* lows, int row, int matrices) const {
    return lows_at(lows, cta / 8 % (kLowCopies / kRows), row, matrices);
  }
  /// Writes the CTA's pairs, by the last 64 threads.
  __device__ __forceinline__ void write_pairs(const LowsToMake& lows) {
    const int at = thread - (kThreads - 8 * kMostLows / 2), row = at / 8, place = at % 8;
    const Part own = lows_of(changes, lows.group, lows.matrices, cta);
    if (at < 0 || row >= kRows || place >= own.count) return;
    const int words = changes.rank / 2;
    const LowPair pair(own.first + place, lows.matrices, words);
    if (run_of(row) != pair.run) return;
    const SlotFactors& f = factors(lows.first + pair.matrix, pair.run);
    const float scale = factor(row) * f.scale;
    float v[2];
#pragma unroll
    for (int i = 0; i < 2; ++i) {
      v[i] = sum(row, kLowColumn + 2 * place + i) * scale;
      if (2 * pair.word + i >= f.rank) v[i] = 0;
      note(row, v[i]);
    }
    const u32 both = make_word(v[0], v[1], lows.round);
#pragma unroll
    for (int copy = 0; copy < kLowCopies / kRows; ++copy)
      store_word(lows_at(lows.to, copy, row, lows.matrices) + pair.matrix * words + pair.word,
                 both);
  }

  /// Products of up to 64 columns, 8 a slot, with the normalised rows of a vector of the width, put
  /// into shared memory without the rows' factors. Lows of the columns' matrices are written
  /// before.
  template <class Lows>
  __device__ __forceinline__ void narrow(const void* norm_weights, const u32* vector, u32 round,
                                         int slots, [[maybe_unused]] const Lows& made) {
    uint4 w[8][kBlocks], weights[kBlocks], x[kBlocks];
    norm(weights, norm_weights);
    constexpr int kBefore = kSlotsBeforeLows<kChanges>;
    take_columns<0, kBefore, 5>(w, slots);
    rows(x, vector, kWidth / 2, round);
    scale(x, weights);
    if constexpr (kChanges) {
      const LowsToMake lows = made();
      const int own = lows_of(changes, lows.group, lows.matrices, cta).count;
      if (own > 0) {
#pragma unroll 1
        for (int s = 0; 4 * s < own; ++s) {
          uint4 a[kBlocks];
          release<kBlocks>(take(a), a);
          put_lows(s, a, x);
        }
        sync();
        write_pairs(lows);
      }
      take_columns<kBefore, 8, 5>(w, slots);
    }
    multiply(w, x);
  }

  /// The weights of slots kFrom to kTo - 1 of a product of 8 columns with N blocks.
  template <int kFrom, int kTo, int N>
  __device__ __forceinline__ void take_blocks(uint4 (&w)[N]) {
    constexpr int kFull = kTo < N / kBlocks ? kTo : N / kBlocks,
                  kLeft = kTo * kBlocks > N ? N % kBlocks : 0;
    int slots[kTo];
#pragma unroll
    for (int s = kFrom; s < kFull; ++s)
      slots[s] = take(reinterpret_cast<uint4(&)[kBlocks]>(w[s * kBlocks]));
    if constexpr (kLeft > 0)
      slots[kFull] = take(reinterpret_cast<uint4(&)[kLeft]>(w[kFull * kBlocks]));
#pragma unroll
    for (int s = kFrom; s < kFull; ++s) release<kBlocks>(slots[s], w + s * kBlocks);
    if constexpr (kLeft > 0) release<kLeft>(slots[kFull], w + kFull * kBlocks);
  }
  template <int kFrom, int kTo, int N>
  __device__ __forceinline__ void multiply_blocks(float (&c)[4][4], const uint4 (&w)[N],
                                                  const uint4 (&x)[N]) {
#pragma unroll
    for (int i = kFrom * kBlocks; i < kTo * kBlocks && i < N; ++i) {
      const int half = 2 * i >= N ? 2 : 0;
      mma(c[half], w[i].x, 0, w[i].y, 0, x[i].x, x[i].y);
      mma(c[half + 1], w[i].z, 0, w[i].w, 0, x[i].z, x[i].w);
    }
  }

  /// Products of 8 columns with a vector of 256 N numbers. A warp's blocks of the vector times
  /// factors() of its halves, for rows 2t and 2t + 1.
  template <int N, class Lows, class Factors>
  __device__ __forceinline__ void wide(const u32* vector, u32 round, const Lows& lows,
                                       const Factors& factors) {
    constexpr int kSlots = (N + kBlocks - 1) / kBlocks,
                  kEarly =
                      kChanges && kRows >= 4 && kSlots > 2 ? 1 : kSlots;  // as kSlotsBeforeLows
    uint4 w[N], x[N];
    take_blocks<0, kEarly>(w);
    float first[2] = {}, second[2] = {};
    if constexpr (kChanges)
      lows.template rows<N>(*this, x, vector, round, first, second);
    else
      rows(x, vector, N * kWarps * 16, round);
    float c[4][4] = {};
    multiply_blocks<0, kEarly>(c, w, x);
    if constexpr (kEarly < kSlots) {
      take_blocks<kEarly, kSlots>(w);
      multiply_blocks<kEarly, kSlots>(c, w, x);
    }
#pragma unroll
    for (int i = 0; i < 2; ++i) {
      const float left = c[0][i] + c[1][i], right = c[2][i] + c[3][i];
      first[i] = kChanges ? first[i] + left : left;
      second[i] = kChanges ? second[i] + right : right;
    }
    factors(first, second);
    put(g, first[0] + second[0], first[1] + second[1], kWidePitch);
    sync();
  }
};

/// The changes of a wide product, from parts of the lows [groups of parts][part][row]: a warp has
/// every eighth group, of 8 parts and rows.
template <int kRows, bool kPerHead>
struct PartialLows {
  static constexpr Group kGroup = kPerHead ? kOfOutput : kOfDown;
  static constexpr int kAll = kPerHead ? Shape::kDeltaHeads : (kCtas * kRows + 7) / 8;
  static constexpr int kOwn = (kAll + kWarps - 1) / kWarps;  ///< Groups of a warp.
  static_assert(!kPerHead || kOwn == 2);
  const u32* words;
  int matrix;

  /// The vector, and what changes add to the sums of both of its halves.
  template <int N, class M>
  __device__ __forceinline__ void rows(const M& m, uint4 (&x)[N], const u32* vector, u32 round,
                                       float (&first)[2], float (&second)[2]) const {
    constexpr int kBlocks = M::kBlocks;
    const int rank = m.changes.rank;
    const u32 bit = (round & 1) << 30;
#pragma unroll
    for (int i = 0; i < N; ++i) fill(x[i], m.g < kRows ? ~bit : bit);
    float d[2][4] = {};
#pragma unroll 1
    for (int from = 0; from < rank; from += 16) {
      u32 b[kRows][2];
      load(m, b, from);
      uint2 parts[kOwn];
      const auto place = [&](int i) {
        const int column = (m.warp + i * kWarps) * 8 + m.g;
        const bool has = m.has(kGroup) && (kPerHead || column < kCtas * kRows);
        return has ? column * (rank / 2) + from / 2 + 2 * m.t : -1;
      };
#pragma unroll
      for (int i = 0; i < kOwn; ++i) fill(parts[i], place(i) < 0 ? bit : ~bit);
#pragma unroll 1
      for (int looks = 0;; ++looks) {
        const bool is_late = look(x, vector + m.g * (N * kWarps * 16) + 4 * m.t, bit, [&](int i) {
          const int slot = i / kBlocks,
                    per = (slot + 1) * kBlocks <= N ? kBlocks : N - slot * kBlocks;
          return slot * 512 + (m.warp * per + i % kBlocks) * 16;
        });
        if (!(look(parts, words, bit, place) || is_late)) break;
        if (looks > kMostLooks) give_up();
      }
      __syncwarp();
#pragma unroll
      for (int i = 0; i < kOwn; ++i) clear(parts[i]);
      multiply(m, d, b, parts);
    }
#pragma unroll
    for (int i = 0; i < N; ++i) clear(x[i]);
    fold_parts<kRows>(d[0], first);
    if constexpr (kPerHead) fold_parts<kRows>(d[1], second);
  }

 private:
  /// The lane's ranks of B of the CTA's column g, by run.
  template <class M>
  __device__ __forceinline__ void load(const M& m, u32 (&b)[kRows][2], int from) const {
#pragma unroll
    for (int run = 0; run < kRows; ++run) {
      b[run][0] = b[run][1] = 0;
      if (run < m.changes.count)
        load_ranks(b[run], m.factors(matrix, run), 8 * m.cta + m.g, from + 4 * m.t);
    }
  }
  template <class M>
  __device__ __forceinline__ void multiply(const M& m, float (&d)[2][4], const u32 (&b)[kRows][2],
                                           const uint2 (&parts)[kOwn]) const {
    uint2 low[2] = {parts[0], parts[kPerHead ? 1 : 0]};
    if constexpr (!kPerHead) {
      float sums[4] = {};
#pragma unroll
      for (int i = 0; i < kOwn; ++i) {
        sums[0] += bf16_lo(parts[i].x), sums[1] += bf16_hi(parts[i].x);
        sums[2] += bf16_lo(parts[i].y), sums[3] += bf16_hi(parts[i].y);
      }
      low[0] = make_uint2(pack_bf16(sums[0], sums[1]), pack_bf16(sums[2], sums[3]));
    }
    const int own = m.run_of(m.g % kRows);
#pragma unroll
    for (int run = 0; run < kRows; ++run) {
      if (run >= m.changes.count) break;
#pragma unroll
      for (int half = 0; half < (kPerHead ? 2 : 1); ++half)
        mma(d[half], b[run][0], 0, b[run][1], 0, own == run ? low[half].x : 0,
            own == run ? low[half].y : 0);
    }
  }
};

}  // namespace heddle::ops::cuda::decode
