// One step of generation as one kernel: 132 CTAs, one a multiprocessor, a warp that brings weights
// and kWarps that multiply.
//
// The loading warp copies the CTA's columns of every matrix, layer after layer, through a ring of
// slots (8 rows of 1024 of the matrix), and waits for nothing but free slots. The others take the
// weights of a product into registers as they come, then look for the product's input, which other
// CTAs write, then multiply: warp w has 1024 / kWarps of each 1024 of the depth, for all columns,
// so that its part of the input is read once. Their sums meet in shared memory.
//
// Every product ends in the words of the next one's input (words.cuh): no barrier of the grid.
// A word of round n is written only by a CTA that has seen what all readers of round n - 1 wrote
// after they had read, so that one bit tells the rounds apart.
//
// Low-rank changes: of products of depth 1024 each warp multiplies its part of the input by A, from
// the ring, and goes on with its part of the lows, rounded, times B, in the same accumulators. For
// the wider inputs the CTAs that make them write what their columns add to the lows; a warp adds up
// those of an eighth or a sixteenth of the CTAs.
#pragma once

#include "loader.cuh"
#include "model.h"
#include "ops/decode_step/cuda/fragments.cuh"

namespace heddle::step_probe {

/// The multiplying warps.
template <int kRows, bool kLora, Mode kMode, int kWarps>
struct Multiplier {
  static constexpr int kBlocks =
      32 / kWarps;  // blocks of 32 of the depth that a warp has of a slot
  static constexpr int kThreads = kWarps * 32;
  using Sh = Shared<kRows, kWarps>;

  Sh& shared;
  Ring ring;
  int cta, thread, warp, lane, g, t;
  int turn = 0;  // of the sums' copies

  __device__ __forceinline__ void sync() { named_sync(1, kThreads); }

  /// This lane's parts of the next slot's row g: blocks of 32, of which it has 8 numbers. Returns
  /// the slot, for `release`.
  template <int N>
  __device__ __forceinline__ int take(uint4 (&w)[N]) {
    const int slot = ring.slot;
    if constexpr (kMode != kChainOnly) guarded_wait(ring.full + 8 * slot, ring.phase);
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
    if constexpr (kMode != kChainOnly) {
      u32 all = w[0].w;
#pragma unroll
      for (int i = 1; i < N; ++i) all &= w[i].w;
      if (__ballot_sync(~0u, all == 0xffffffffu)) __nanosleep(20);
      if (lane == 0) mbar_arrive(ring.empty + 8 * slot);
    }
  }

  /// Row g of a vector of `words`, this warp's part of each 1024 of the depth.
  template <int N>
  __device__ __forceinline__ void rows(uint4 (&x)[N], const u32* vector, int words, u32 round) {
#pragma unroll
    for (int i = 0; i < N; ++i) x[i] = make_uint4(0, 0, 0, 0);
    if constexpr (kMode == kStreamOnly) return;
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
      v = pack_bf16(lo * bf16_lo(w), hi * bf16_hi(w));
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
    return rsqrtf(squares / kWidth + 1e-6f);
  }
  __device__ __forceinline__ void norm(uint4 (&weights)[kBlocks], const bf16* norm) const {
#pragma unroll
    for (int i = 0; i < kBlocks; ++i)
      weights[i] = __ldg(reinterpret_cast<const uint4*>(norm + (warp * kBlocks + i) * 32 + 8 * t));
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
  __device__ __forceinline__ float sum(int row, int column, int pitch) const {
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

  /// Products of up to 8 S columns with the row's part `x`, put into shared memory.
  /// `adapter(column)` of a column and its row of B at b + 16 row(column); adapters from first to
  /// last.
  template <int S, bool kNorm, bool kChanges, class Adapter, class Row>
  __device__ __forceinline__ void narrow(const bf16* norm_weights, const u32* vector, u32 round,
                                         uint4 (&x)[kBlocks], const bf16* b, int first, int last,
                                         const Adapter& adapter, const Row& row) {
    uint4 w[S][kBlocks];
    uint2 change[kChanges ? S : 1];
    uint4 weights[kBlocks];
    if constexpr (kNorm) norm(weights, norm_weights);
    if constexpr (kChanges) {
#pragma unroll
      for (int s = 0; s < S; ++s)
        change[s] = __ldg(reinterpret_cast<const uint2*>(b + row(8 * s + g) * kRank + 4 * t));
    }
#pragma unroll
    for (int s = 0, slot = 0; s < S; ++s) {
      const int before = slot;
      slot = take(w[s]);
      if (s > 0) release<kBlocks>(before, w[s > 0 ? s - 1 : 0]);
      if (s == S - 1) release<kBlocks>(slot, w[s]);
    }
    if constexpr (kNorm) {
      rows(x, vector, kWidth / 2, round);
      scale(x, weights);
    }
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
    if constexpr (kChanges) {
      for (int a = first; a <= last; ++a) {
        uint4 lo[kBlocks], hi[kBlocks];
        const int slot_lo = take(lo), slot_hi = take(hi);
        float low[2][4] = {};
#pragma unroll
        for (int i = 0; i < kBlocks; ++i) {
          mma(low[0], lo[i].x, hi[i].x, lo[i].y, hi[i].y, x[i].x, x[i].y);
          mma(low[1], lo[i].z, hi[i].z, lo[i].w, hi[i].w, x[i].z, x[i].w);
        }
        release<kBlocks>(slot_lo, lo), release<kBlocks>(slot_hi, hi);
        const u32 b0 = transposed(pack_bf16(low[0][0] + low[1][0], low[0][1] + low[1][1]));
        const u32 b1 = transposed(pack_bf16(low[0][2] + low[1][2], low[0][3] + low[1][3]));
#pragma unroll
        for (int s = 0; s < T; ++s) {
          const bool has_lo = adapter(16 * s + g) == a, has_hi = adapter(16 * s + 8 + g) == a;
          const uint2 lo = change[2 * s], hi = change[2 * s + 1 < S ? 2 * s + 1 : 0];
          mma(c[s], has_lo ? lo.x : 0, has_hi && 2 * s + 1 < S ? hi.x : 0, has_lo ? lo.y : 0,
              has_hi && 2 * s + 1 < S ? hi.y : 0, b0, b1);
        }
      }
    }
#pragma unroll
    for (int s = 0; s < T; ++s) {
      put(16 * s + g, c[s][0], c[s][1], kRowPitch<kRows>);
      put(16 * s + 8 + g, c[s][2], c[s][3], kRowPitch<kRows>);
    }
    sync();
  }

  static constexpr int kWidePitch = 12;
  /// Products of 8 columns with a vector of 1024 kDeep, of which the lows come from `makers` CTAs.
  template <int kBlocksHere>
  __device__ __forceinline__ void wide(const u32* vector, u32 round, const bf16* b, const u32* lows,
                                       int makers) {
    constexpr int kFull = kBlocksHere / kBlocks, kLeft = kBlocksHere % kBlocks;
    uint4 w[kBlocksHere], x[kBlocksHere];
    int slots[kFull + 1];
    uint2 change = make_uint2(0, 0);
    if constexpr (kLora) change = __ldg(reinterpret_cast<const uint2*>(b + g * kRank + 4 * t));
#pragma unroll
    for (int s = 0; s < kFull; ++s)
      slots[s] = take(reinterpret_cast<uint4(&)[kBlocks]>(w[s * kBlocks]));
    if constexpr (kLeft > 0)
      slots[kFull] = take(reinterpret_cast<uint4(&)[kLeft]>(w[kFull * kBlocks]));
#pragma unroll
    for (int s = 0; s < kFull; ++s) release<kBlocks>(slots[s], w + s * kBlocks);
    if constexpr (kLeft > 0) release<kLeft>(slots[kFull], w + kFull * kBlocks);
    rows(x, vector, kBlocksHere * kWarps * 16, round);
    float c[4][4] = {};
#pragma unroll
    for (int i = 0; i < kBlocksHere; ++i) {
      mma(c[i % 2 * 2], w[i].x, 0, w[i].y, 0, x[i].x, x[i].y);
      mma(c[i % 2 * 2 + 1], w[i].z, 0, w[i].w, 0, x[i].z, x[i].w);
    }
    if constexpr (kLora) {
      float low[4] = {};
      if constexpr (kMode != kStreamOnly) partial_sums(low, lows, makers, round);
      mma(c[0], change.x, 0, change.y, 0, pack_bf16(low[0], low[1]), pack_bf16(low[2], low[3]));
    }
    put(g, (c[0][0] + c[1][0]) + (c[2][0] + c[3][0]), (c[0][1] + c[1][1]) + (c[2][1] + c[3][1]),
        kWidePitch);
    sync();
  }

  /// Ranks 4t to 4t + 3 of row g, of CTAs warp, warp + kWarps, ...
  __device__ __forceinline__ void partial_sums(float (&low)[4], const u32* lows, int makers,
                                               u32 round) {
    const auto add = [&](const uint2& v) {
      low[0] += bf16_lo(v.x), low[1] += bf16_hi(v.x), low[2] += bf16_lo(v.y),
          low[3] += bf16_hi(v.y);
    };
    if constexpr (kRows == 1) {  // a CTA's lows a lane's g
      constexpr int N = (kCtas + 8 * kWarps - 1) / (8 * kWarps);
      const int first = warp + g * kWarps;
      const auto maker = [&](int i) { return first + i * 8 * kWarps; };
      uint2 v[N];
      await_words(v, lows + 2 * t, round,
                  [&](int i) { return (maker(i) < makers ? maker(i) : first) * kLowWords; });
      __syncwarp();
#pragma unroll
      for (int i = 0; i < N; ++i) {
        if (maker(i) < makers) add(v[i]);
      }
#pragma unroll
      for (int i = 0; i < 4; ++i) {
#pragma unroll
        for (int d = 4; d < 32; d *= 2) low[i] += __shfl_xor_sync(~0u, low[i], d);
        if (g) low[i] = 0;
      }
    } else {
      constexpr int N = (kCtas + kWarps - 1) / kWarps;
      const auto maker = [&](int i) { return warp + i * kWarps; };
      if (g < kRows) {
        uint2 v[N];
        await_words(v, lows + g * kCtas * kLowWords + 2 * t, round,
                    [&](int i) { return (maker(i) < makers ? maker(i) : warp) * kLowWords; });
#pragma unroll
        for (int i = 0; i < N; ++i) {
          if (maker(i) < makers) add(v[i]);
        }
      }
      __syncwarp();
    }
  }

  /// Writes what a row's columns, one a lane, add to the lows; `a`: the lane's 16 of A, zeros where
  /// it has no column.
  __device__ __forceinline__ void write_lows(u32* to, float x, const uint4 (&a)[2], u32 round) {
    float v[16];
    const u32 words[8] = {a[0].x, a[0].y, a[0].z, a[0].w, a[1].x, a[1].y, a[1].z, a[1].w};
#pragma unroll
    for (int i = 0; i < 8; ++i)
      v[2 * i] = x * bf16_lo(words[i]), v[2 * i + 1] = x * bf16_hi(words[i]);
#pragma unroll
    for (int n = 8, d = 16; n > 0; n /= 2, d /= 2) {
      const bool upper = lane & d;
#pragma unroll
      for (int i = 0; i < n; ++i) {
        const float mine = upper ? v[i + n] : v[i], other = upper ? v[i] : v[i + n];
        v[i] = mine + __shfl_xor_sync(~0u, other, d);
      }
    }
    v[0] += __shfl_xor_sync(~0u, v[0], 1);
    const float next = __shfl_xor_sync(~0u, v[0], 2);
    if ((lane & 3) == 0) store_word(to + lane / 4, make_word(v[0], next, round));
  }

  __device__ void run(const Model& m, const Exchange& e, int layers, u32 step);
};

template <int kRows, bool kLora, Mode kMode, int kWarps>
__device__ void Multiplier<kRows, kLora, kMode, kWarps>::run(const Model& m, const Exchange& e,
                                                             int layers, u32 step) {
  const Part in = part_of(kInputs / 2, cta), gu = part_of(kInner / 2, cta);
  const bool is_wide = cta < kWideCtas;
  const int own_row = thread / 8, own_column = thread % 8;  // of the residual
  const bool owns = is_wide && thread < 8 * kRows;
  const auto none = [](int) { return 0; };
  float residual = 0;
  const u32 residual_round = step * (layers + 1), layer_round = step * layers;
  const auto write_residual = [&](u32* to, u32 round) {
    const float next = __shfl_down_sync(~0u, residual, 1);
    if (owns && own_column % 2 == 0)
      store_word(to + own_row * kWidth / 2 + 4 * cta + own_column / 2,
                 make_word(residual, next, round));
  };
  if (owns) residual = __bfloat162float(m.embedding[own_row * kWidth + 8 * cta + own_column]);
  if (thread < (8 * kRows + 31) / 32 * 32) write_residual(e.residual, residual_round);

  for (int layer = 0; layer < layers; ++layer) {
    const u32 round = layer_round + layer;
    uint4 x[kBlocks];
    // Inputs of the mixer.
    narrow<8, true, kLora>(
        m.norm_inputs + layer * kWidth, e.residual, residual_round + layer, x,
        m.b_inputs + (static_cast<int64_t>(layer) * kInputs + 2 * in.first) * kRank,
        input_adapter(2 * in.first), input_adapter(2 * (in.first + in.count) - 1),
        [&](int column) { return input_adapter(2 * in.first + column); },
        [&](int column) { return min(column, 2 * in.count - 1); });
    for (int i = thread; i < kRows * 64; i += kThreads) {
      const int row = i / 64, column = i % 64;
      const float v = sum(row, column, kRowPitch<kRows>) * factor(row);
      const float next = __shfl_down_sync(~0u, v, 1);
      if (column % 2 == 0 && column < 2 * in.count)
        store_word(e.inputs + row * kInputs / 2 + in.first + column / 2, make_word(v, next, round));
    }
    end();
    if (is_wide) {
      // Stand-in for the mixer: a row a warp, a column a lane.
      uint4 a[2] = {};
      const int column = 16 * cta + lane % 16;
      if (kLora && warp < kRows && lane < 16) {
        const auto* from = reinterpret_cast<const uint4*>(
            m.a_out + (static_cast<int64_t>(layer) * kMixer + column) * kRank);
        a[0] = __ldg(from), a[1] = __ldg(from + 1);
      }
      for (int row = warp; row < kRows; row += kWarps) {
        u32 v[5] = {};
        if constexpr (kMode != kStreamOnly) {
          await_words(v, e.inputs + row * kInputs / 2, round,
                      [&](int i) { return i < 4 ? i * 1024 + column / 2 : 4096 + column / 256; });
        }
        float f[5];
#pragma unroll
        for (int i = 0; i < 5; ++i) {
          const int odd = i < 4 ? column % 2 : column / 128 % 2;
          f[i] = kRead * (odd ? bf16_hi(v[i]) : bf16_lo(v[i]));
        }
        const float y = silu(f[3]) * (f[2] + f[0] * f[1] / (1.f + __expf(-f[4])));
        const float next = __shfl_down_sync(~0u, y, 1);
        if (lane < 16 && lane % 2 == 0)
          store_word(e.mixed + row * kMixer / 2 + column / 2, make_word(y, next, round));
        if constexpr (kLora)
          write_lows(e.low_mixed + (row * kCtas + cta) * kLowWords,
                     __bfloat162float(__float2bfloat16(y)), a, round);
      }
      // Output, onto the residual.
      wide<2 * kBlocks>(e.mixed, round,
                        m.b_out + (static_cast<int64_t>(layer) * kWidth + 8 * cta) * kRank,
                        e.low_mixed, kWideCtas);
      if (owns) residual += kRead * sum(own_row, own_column, kWidePitch);
      if (thread < (8 * kRows + 31) / 32 * 32) write_residual(e.middle, round);
      end();
    }
    // Gate and up: pairs of columns 0 to 27 and 28 to 55.
    uint4 a[2] = {};
    if (kLora && warp < kRows && lane < 2 * gu.count) {
      const auto* from = reinterpret_cast<const uint4*>(
          m.a_down + (static_cast<int64_t>(layer) * kInner + 2 * gu.first + lane) * kRank);
      a[0] = __ldg(from), a[1] = __ldg(from + 1);
    }
    narrow<7, true, kLora>(
        m.norm_gate_up + layer * kWidth, e.middle, round, x,
        m.b_gate_up + (static_cast<int64_t>(layer) * 2 * kInner + 2 * gu.first) * kRank, 0, 1,
        [&](int column) { return column < 28 ? 0 : 1; },
        [&](int column) {
          const int pair = min(column < 28 ? column : column - 28, 2 * gu.count - 1);
          return (column < 28 ? 0 : kInner) + pair;
        });
    for (int row = warp; row < kRows; row += kWarps) {
      const float scale = factor(row);
      const int pair = min(lane, 27);
      const float gate = sum(row, pair, kRowPitch<kRows>) * scale;
      const float y = silu(gate) * (sum(row, pair + 28, kRowPitch<kRows>) * scale);
      const float next = __shfl_down_sync(~0u, y, 1);
      if (lane % 2 == 0 && lane < 2 * gu.count)
        store_word(e.inner + row * kInner / 2 + gu.first + lane / 2, make_word(y, next, round));
      if constexpr (kLora)
        write_lows(e.low_inner + (row * kCtas + cta) * kLowWords,
                   __bfloat162float(__float2bfloat16(y)), a, round);
    }
    end();
    if (is_wide) {
      wide<3 * kBlocks + kBlocks / 2>(
          e.inner, round, m.b_down + (static_cast<int64_t>(layer) * kWidth + 8 * cta) * kRank,
          e.low_inner, kCtas);
      if (owns) residual += kRead * sum(own_row, own_column, kWidePitch);
      if (thread < (8 * kRows + 31) / 32 * 32)
        write_residual(e.residual, residual_round + layer + 1);
      end();
    }
  }
  const Part head = part_of(kVocabulary / 2, cta);
  uint4 x[kBlocks];
  {
    uint4 weights[kBlocks];
    norm(weights, m.norm_head);
    rows(x, e.residual, kWidth / 2, residual_round + layers);
    scale(x, weights);
    sync();
  }
  float scales[(kRows * 64 + kThreads - 1) / kThreads];
#pragma unroll
  for (int i = 0; i * kThreads < kRows * 64; ++i)
    scales[i] = factor(min((thread + i * kThreads) / 64, kRows - 1));
  for (int c = 0; c < 2 * head.count; c += 64) {
    narrow<8, false, false>(nullptr, nullptr, 0, x, nullptr, 0, 0, none, none);
#pragma unroll
    for (int i = 0; i * kThreads < kRows * 64; ++i) {
      const int at = thread + i * kThreads, row = at / 64, column = at % 64;
      if (at < kRows * 64 && c + column < 2 * head.count)
        e.logits[static_cast<int64_t>(row) * kVocabulary + 2 * head.first + c + column] =
            sum(row, column, kRowPitch<kRows>) * scales[i];
    }
    end();
  }
}

template <int kRows, bool kLora, Mode kMode, int kWarps>
__global__ void __launch_bounds__(kWarps * 32 + 128, 1)
    step_kernel(const __grid_constant__ Model m, const __grid_constant__ Exchange e, int layers,
                u32 step) {
  using Sh = Shared<kRows, kWarps>;
  constexpr int kSlots = kSlotsThatFit<kRows, kWarps>;
  extern __shared__ __align__(128) unsigned char memory[];
  Sh& shared = *reinterpret_cast<Sh*>(memory + kSlots * kSlotBytes);
  const Ring ring{smem_u32(memory), smem_u32(shared.full), smem_u32(shared.empty), kSlots};
  if (threadIdx.x == 0) {
    for (int i = 0; i < kSlots; ++i) {
      mbar_init(ring.full + 8 * i, 1);
      mbar_init(ring.empty + 8 * i, kWarps);
    }
    asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory");
  }
  __syncthreads();
  const int thread = threadIdx.x, warp = thread / 32, lane = thread % 32;
  if (warp >= kWarps) {
    set_max_registers_down<64>();
    if (kMode != kChainOnly && warp == kWarps) {
      u64 policy;
      asm volatile("createpolicy.fractional.L2::evict_first.b64 %0, 1.0;" : "=l"(policy));
      Loader loader{ring, policy, lane};
      load<kLora>(m, layers, loader);
    }
  } else {
    set_max_registers_up<kWarps == 16 ? 104 : 216>();
    Multiplier<kRows, kLora, kMode, kWarps> multiplier{
        shared, ring, static_cast<int>(blockIdx.x), thread, warp, lane, lane / 4, lane % 4};
    multiplier.run(m, e, layers, step);
  }
}

}  // namespace heddle::step_probe
