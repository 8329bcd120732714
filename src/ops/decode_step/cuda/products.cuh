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
  int cta, thread;
  const typename ChangesOf<kChanges>::Type& changes;
  int warp, lane, g, t;
  int layer = 0;
  int turn = 0;  ///< Number of the sums' copy.
  /// Rows of which this thread met a number that is not finite or does not fit into a word, a bit
  /// each.
  u32 lost = 0;

  /// Where the thread is.
  __device__ __forceinline__ void place() {
    warp = thread / 32, lane = thread % 32, g = lane / 4, t = lane % 4;
  }
  __device__ __forceinline__ void sync() const { named_sync(1, kThreads); }
  /// Before `x` of the row becomes a word.
  __device__ __forceinline__ void note(int row, float x) {
    lost |= static_cast<u32>(!(fabsf(x) <= kLargest)) << row;
  }

  /// This lane's parts of the next slot's row g: blocks of 32, of which it has 8 numbers. Returns
  /// the slot, for `release`. In a deadlock the loading warp ends the program.
  template <int N>
  __device__ __forceinline__ int take(uint4 (&w)[N]) {
    const int slot = ring.slot;
    mbar_wait(ring.full + 8 * slot, static_cast<int>(ring.phase));
    const u32 row = ring.base + slot * kSlotBytes + g * kPitch + (warp * N * 32 + 8 * t) * 2;
#pragma unroll
    for (int i = 0; i < N; ++i) w[i] = ld_shared16(row + i * 64);
    ring.next();
    return slot;
  }
  /// Gives the slot back once `w`, taken from it, is in registers: an arrival can overtake loads
  /// that wait behind other warps' looks, and the next copy is not ordered with them. The vote
  /// needs a register of each load, and which of two lanes arrives goes by it.
  template <int N>
  __device__ __forceinline__ void release(int slot, const uint4* w) {
    u32 all = w[0].w;
#pragma unroll
    for (int i = 1; i < N; ++i) all &= w[i].w;
    const int arriving = __any_sync(~0u, all == 0xffffffffu);
    __syncwarp();  // a vote orders no memory
    if (lane == arriving) mbar_arrive(ring.empty + 8 * slot);
  }

  /// Row g of a vector of `words`, this warp's part of each 1024 of the depth. Past the last row
  /// the first ones again, whose products nobody reads.
  template <int N>
  __device__ __forceinline__ void rows(uint4 (&x)[N], const u32* vector, int words, u32 round) {
    await_words(x, vector + (g % kRows * words + 4 * t), round, block_place<N>());
    __syncwarp();
  }
  /// Offset of block i of N of a row. In 64 bits, so that what is known of it goes into the loads.
  template <int N>
  __device__ __forceinline__ auto block_place() const {
    constexpr int kRest = N % kBlocks;
    const int64_t full = warp * kBlocks * 16, rest = warp * kRest * 16;
    return [full, rest](int i) {
      return (i < N - kRest ? full : rest) + (i / kBlocks * 512 + i % kBlocks * 16);
    };
  }

  /// x times the norm's weights, in bf16; what is left of the norm is a factor of the row, whose
  /// squares meet with the sums.
  template <class Weights>
  __device__ __forceinline__ void scale(uint4 (&x)[kBlocks], const Weights& weights) {
    // Products of all rows with each other: those of a row with itself are its squares.
    float squares[4] = {};
    const auto pair = [&](u32& v, u32 w) {
      v = pack_bf16(bf16_lo(v) * (offset + bf16_lo(w)), bf16_hi(v) * (offset + bf16_hi(w)));
    };
#pragma unroll
    for (int i = 0; i < kBlocks; ++i) {
      uint4& v = x[i];
      const uint4 w = weights(i);
      v.x = read_pair(v.x), v.y = read_pair(v.y), v.z = read_pair(v.z), v.w = read_pair(v.w);
      mma(squares, v.x, 0, v.y, 0, v.x, v.y);
      mma(squares, v.z, 0, v.w, 0, v.z, v.w);
      pair(v.x, w.x), pair(v.y, w.y), pair(v.z, w.z), pair(v.w, w.w);
    }
    if (g < kRows && t == g / 2)
      shared.squares[turn & 1][warp][g] = g % 2 ? squares[1] : squares[0];
  }
  __device__ __forceinline__ float factor(int row) const {
    float squares = 0;
#pragma unroll
    for (int w = 0; w < kWarps; ++w) squares += shared.squares[turn & 1][w][row];
    // NaN where the sum is infinite, whose root would be 0.
    return rsqrtf(squares / kWidth + eps) + (squares - squares);
  }
  /// The weights of a norm that go with this lane's blocks.
  __device__ __forceinline__ const uint4* norm(const void* weights, int i) const {
    return static_cast<const uint4*>(weights) + (warp * kBlocks + i) * 4 + t;
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

  /// Copies B of the CTA's columns of a wide product into shared memory, a warp those of a run.
  /// They are there after cp_async_commit(), cp_async_wait() and a barrier.
  __device__ __forceinline__ void bring_wide(int matrix) {
    if (cta >= kWideCtas || warp >= changes.count) return;
    const SlotFactors& f = factors(matrix, warp);
    const int rank = f.rank, fours = changes.rank / 4;
    u32* const to = shared.changes.wide + warp * 8 * (2 * fours);
#pragma unroll 1
    for (int i = lane; i < 8 * fours; i += 32) {
      const int column = i >> (__ffs(fours) - 1), first = 4 * (i & (fours - 1)),
                count = min(max(rank - first, 0), 4);
      const bf16* const from = static_cast<const bf16*>(f.b) + (8 * cta + column) * rank + first;
      if (rank % 4 == 0) {  // rows begin on 8 bytes
        asm volatile("cp.async.ca.shared.global [%0], [%1], 8, %2;" ::"r"(smem_u32(to + 2 * i)),
                     "l"(from), "r"(2 * count)
                     : "memory");
      } else {
        u64 four = 0;
#pragma unroll 1
        for (int k = 0; k < count; ++k) four |= static_cast<u64>(load_factor2(from + k)) << 16 * k;
        *reinterpret_cast<u64*>(to + 2 * i) = four;
      }
    }
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
  /// Place of the row's lows of `matrices` matrices.
  __device__ __forceinline__ int low_place(int copy, int row, int matrices) const {
    return (copy * kRows + row) * (matrices == 2 ? 2 : 4) * (changes.rank / 2);
  }
  /// In the copy that this CTA reads.
  __device__ __forceinline__ const u32* own_lows(u32* lows, int row, int matrices) const {
    return lows + low_place(cta / 8 % (kLowCopies / kRows), row, matrices);
  }
  /// A pair of lows that one of the last 64 threads writes once the sums are there; to: null where
  /// it has none.
  struct PairToWrite {
    u32* to = nullptr;
    int row, column, left;  ///< Column in the sums; ranks from the pair on.
    float scale;
  };
  __device__ __forceinline__ PairToWrite own_pair(const LowsToMake& lows, const Part& own) const {
    const int at = thread - (kThreads - 8 * kMostLows / 2), row = at / 8, place = at % 8;
    PairToWrite pair;
    if (at < 0 || row >= kRows || place >= own.count) return pair;
    const int words = changes.rank / 2;
    const LowPair which(own.first + place, lows.matrices, words);
    if (run_of(row) != which.run) return pair;
    const SlotFactors& f = factors(lows.first + which.matrix, which.run);
    pair.to = lows.to + low_place(0, row, lows.matrices) + which.matrix * words + which.word;
    pair.row = row, pair.column = kLowColumn + 2 * place;
    pair.left = f.rank - 2 * which.word, pair.scale = f.scale;
    return pair;
  }
  __device__ __forceinline__ void write(const PairToWrite& pair, const LowsToMake& lows) {
    if (pair.to == nullptr) return;
    const float scale = factor(pair.row) * pair.scale;
    float v[2];
#pragma unroll
    for (int i = 0; i < 2; ++i) {
      v[i] = i < pair.left ? sum(pair.row, pair.column + i) * scale : 0.f;
      note(pair.row, v[i]);
    }
    const u32 both = make_word(v[0], v[1], lows.round);
    const int copy = low_place(1, 0, lows.matrices);
#pragma unroll
    for (int i = 0; i < kLowCopies / kRows; ++i) store_word(pair.to + i * copy, both);
  }

  /// Products of up to 64 columns, 8 a slot, with the normalised rows of a vector of the width, put
  /// into shared memory without the rows' factors. Lows of the columns' matrices are written
  /// before, and B of the next wide product's columns is brought near.
  template <class Lows>
  __device__ __forceinline__ void narrow(const void* norm_weights, const u32* vector, u32 round,
                                         int slots, [[maybe_unused]] int wide_matrix,
                                         [[maybe_unused]] const Lows& made) {
    constexpr int kBefore = kSlotsBeforeLows<kChanges>;
    uint4 w[8][kBlocks], x[kBlocks];
    if constexpr (kChanges) {
      // In shared memory, for the registers.
      uint4(&weights)[16] = shared.norm[warp];
      static_assert(kBlocks * 4 == 16);
      if (g < kBlocks) cp_async16(smem_u32(&weights[lane]), norm(norm_weights, g), true);
      take_columns<0, kBefore, 5>(w, slots);
      bring_wide(wide_matrix);
      cp_async_commit();
      rows(x, vector, kWidth / 2, round);
      cp_async_wait<0>();
      __syncwarp();
      scale(x, [&](int i) { return weights[4 * i + t]; });
    } else {
      uint4 weights[kBlocks];
#pragma unroll
      for (int i = 0; i < kBlocks; ++i) weights[i] = __ldg(norm(norm_weights, i));
      take_columns<0, kBefore, 5>(w, slots);
      rows(x, vector, kWidth / 2, round);
      scale(x, [&](int i) { return weights[i]; });
    }
    if constexpr (kChanges) {
      const LowsToMake lows = made();
      const Part own = lows_of(changes, lows.group, lows.matrices, cta);
      if (own.count > 0) {
#pragma unroll 1
        for (int s = 0; 4 * s < own.count; ++s) {
          uint4 a[kBlocks];
          release<kBlocks>(take(a), a);
          put_lows(s, a, x);
        }
        const PairToWrite pair = own_pair(lows, own);
        sync();
        write(pair, lows);
      }
      take_columns<kBefore, 8, 5>(w, slots);
    }
    multiply(w, x);
  }

  /// The weights of a product of 8 columns with N blocks.
  template <int N>
  __device__ __forceinline__ void take_blocks(uint4 (&w)[N]) {
    constexpr int kFull = N / kBlocks, kLeft = N % kBlocks;
    int slots[kFull + 1];
#pragma unroll
    for (int s = 0; s < kFull; ++s)
      slots[s] = take(reinterpret_cast<uint4(&)[kBlocks]>(w[s * kBlocks]));
    if constexpr (kLeft > 0)
      slots[kFull] = take(reinterpret_cast<uint4(&)[kLeft]>(w[kFull * kBlocks]));
#pragma unroll
    for (int s = 0; s < kFull; ++s) release<kBlocks>(slots[s], w + s * kBlocks);
    if constexpr (kLeft > 0) release<kLeft>(slots[kFull], w + kFull * kBlocks);
  }

  /// Products of 8 columns with a vector of 256 N numbers. A warp's blocks of the vector times
  /// factors() of its halves, for rows 2t and 2t + 1.
  template <int N, class Lows, class Factors>
  __device__ __forceinline__ void wide(const u32* vector, u32 round, const Lows& lows,
                                       const Factors& factors) {
    uint4 w[N], x[N];
    take_blocks(w);
    float first[2] = {}, second[2] = {};
    if constexpr (kChanges)
      lows.template rows<N>(*this, x, vector, round, first, second);
    else
      rows(x, vector, N * kWarps * 16, round);
    float c[4][4] = {};
#pragma unroll
    for (int i = 0; i < N; ++i) {
      const int half = 2 * i >= N ? 2 : 0;
      mma(c[half], w[i].x, 0, w[i].y, 0, x[i].x, x[i].y);
      mma(c[half + 1], w[i].z, 0, w[i].w, 0, x[i].z, x[i].w);
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

/// The changes of a wide product, from parts of the lows [step of 16 ranks][groups of parts]
/// [part][row][8]: a warp has every eighth group, of 8 parts and rows.
template <int kRows, bool kPerHead>
struct PartialLows {
  static constexpr Group kGroup = kPerHead ? kOfOutput : kOfDown;
  static constexpr int kColumns = kPerHead ? kMixedLows : kInnerLows<kRows>,
                       kAll = (kColumns + 7) / 8;
  static constexpr int kOwn = (kAll + kWarps - 1) / kWarps;  ///< Groups of a warp.
  static_assert(!kPerHead || kOwn == 2);
  const u32* words;

  /// The vector, and what changes add to the sums of both of its halves.
  template <int N, class M>
  __device__ __forceinline__ void rows(const M& m, uint4 (&x)[N], const u32* vector, u32 round,
                                       float (&first)[2], float (&second)[2]) const {
    const u32 bit = (round & 1) << 30;
    const u32* const row = vector + (m.g % kRows * (N * kWarps * 16) + 4 * m.t);
    const auto place = m.template block_place<N>();
#pragma unroll
    for (int i = 0; i < N; ++i) load_words(x[i], row + place(i));
    float d[2][4] = {};
    const int own = m.warp * 8 + m.g;
    const u32* from = words + part_place(kColumns, own, 2 * m.t);
#pragma unroll 1
    for (int word = 0; word < m.changes.rank / 2; word += 8, from += kColumns * 8) {
      uint2 parts[kOwn];
#pragma unroll
      for (int i = 0; i < kOwn; ++i) {
        const int column = own + i * kWarps * 8;
        const bool is_there = (i + 1) * kWarps * 8 <= kColumns || column < kColumns;
        fill(parts[i], m.has(kGroup) && is_there ? ~bit : bit);
      }
#pragma unroll 1
      for (int looks = 0;; ++looks) {
        const bool is_late = look(x, row, bit, place);
        if (!(look(parts, from, bit, [](int i) { return i * kWarps * 8 * 8; }) || is_late)) break;
        if (looks > kMostLooks) give_up();
      }
      __syncwarp();
#pragma unroll
      for (int i = 0; i < kOwn; ++i) clear(parts[i]);
      multiply(m, d, word, parts);
    }
#pragma unroll
    for (int i = 0; i < N; ++i) clear(x[i]);
    fold_parts<kRows>(d[0], first);
    if constexpr (kPerHead) fold_parts<kRows>(d[1], second);
  }

 private:
  template <class M>
  __device__ __forceinline__ void multiply(const M& m, float (&d)[2][4], int word,
                                           const uint2 (&parts)[kOwn]) const {
    uint2 low[2] = {parts[0], parts[kPerHead ? 1 : 0]};
    if constexpr (!kPerHead) {
      // Sums over the parts by products with a unit matrix: its rows are the ranks.
      const u32 unit = m.g / 2 == m.t ? 0x3f80u << 16 * (m.g % 2) : 0;
      float sums[4] = {};
#pragma unroll
      for (int i = 0; i < kOwn; ++i) mma(sums, unit, 0, 0, unit, parts[i].x, parts[i].y);
      low[0] = make_uint2(transposed(pack_bf16(sums[0], sums[1])),
                          transposed(pack_bf16(sums[2], sums[3])));
    }
    const int own = m.run_of(m.g % kRows), words = m.changes.rank / 2;
    const u32* b = m.shared.changes.wide + m.g * words + word + 2 * m.t;
#pragma unroll 1
    for (int run = 0; run < m.changes.count; ++run, b += 8 * words) {
      const uint2 of_run = *reinterpret_cast<const uint2*>(b);
#pragma unroll
      for (int half = 0; half < (kPerHead ? 2 : 1); ++half)
        mma(d[half], of_run.x, 0, of_run.y, 0, own == run ? low[half].x : 0,
            own == run ? low[half].y : 0);
    }
  }
};

}  // namespace heddle::ops::cuda::decode
