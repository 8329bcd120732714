// The mixer of a Gated DeltaNet layer: convolution, gates, delta rule, gated norm.
//
// A CTA has 16 columns of a head for 1 row, all 128 of one row for 8, so that a thread always has 8
// numbers of the state times the rows; they are on their way before the inputs are looked for. CTAs
// of one head each do the convolution of all its q and k. The first of them shifts its inputs when
// all have read them, and each writes the squares of its outputs: the norm is a factor of the head,
// which the output product applies.
#pragma once

#include "ops/cuda/vector.cuh"
#include "ops/decode_step/cuda/products.cuh"

namespace heddle::ops::cuda::decode {

/// log(1 + e^x); from 20 on the two sides agree to fp32.
__device__ __forceinline__ float softplus(float x) { return x > 20.f ? x : log1pf(expf(x)); }
__device__ __forceinline__ float rounded(float x) {
  return __bfloat162float(__float2bfloat16_rn(x));
}
__device__ __forceinline__ float number(const void* data, int i) {
  return __bfloat162float(static_cast<const bf16*>(data)[i]);
}

/// The last inputs of two channels of a convolution of 4, three of each.
struct History {
  u32 before[3];
  u32* from;
  __device__ __forceinline__ void load() {
#pragma unroll
    for (int i = 0; i < 3; ++i) before[i] = from[i];
  }
  /// SiLU of the convolution; `now` goes into the history.
  __device__ __forceinline__ float2 step(u32 now, const uint4& taps) {
    float a = bf16_hi(taps.y) * bf16_lo(now), b = bf16_hi(taps.w) * bf16_hi(now);
    a += bf16_lo(taps.x) * bf16_lo(before[0]), b += bf16_lo(taps.z) * bf16_hi(before[1]);
    a += bf16_hi(taps.x) * bf16_hi(before[0]), b += bf16_hi(taps.z) * bf16_lo(before[2]);
    a += bf16_lo(taps.y) * bf16_lo(before[1]), b += bf16_lo(taps.w) * bf16_hi(before[2]);
    before[0] = before[0] >> 16 | before[1] << 16;
    before[1] = (now & 0xffff) | before[2] << 16;
    before[2] = before[2] >> 16 | (now & 0xffff0000u);
    return make_float2(rounded(a * sigmoid(a)), rounded(b * sigmoid(b)));
  }
  __device__ __forceinline__ void store() const {
#pragma unroll
    for (int i = 0; i < 3; ++i) from[i] = before[i];
  }
};

/// Waits for a row's words at base + offset(i) and the lows of the matrix of which they begin with
/// columns `column` and the next, if there are any; returns what changes add to these two.
template <int N, class Offset>
__device__ __forceinline__ float2 await_changed(u32 (&v)[N], const u32* base, const Offset& offset,
                                                const SlotFactors& f, int column, const u32* lows,
                                                bool has_lows, u32 round, int rank) {
  float2 sums = make_float2(0, 0);
#pragma unroll 1
  for (int first = 0; first < rank; first += 16) {
    ColumnPair b;
    b.load(f, column, first);
    uint4 low[2];
    const auto place = [&](int i) { return has_lows ? first / 2 + 4 * i : -1; };
    await_both(v, base, offset, low, lows, place, round);
    b.add(sums, low[0], low[1]);
  }
  ColumnPair::add_slowly(sums, f, column, lows);
  return sums;
}
/// The same for z, whose words come with those of b and a: a column of one of these matrices too,
/// what changes add to it goes to `gate`.
template <class Offset, class M>
__device__ __forceinline__ float2 await_changed_gates(u32 (&v)[3], const u32* base,
                                                      const Offset& offset, const M& m, int run,
                                                      int column, int matrix, int head,
                                                      const u32* lows, bool has_lows, u32 round,
                                                      float& gate) {
  const int rank = m.changes.rank;
  const SlotFactors &f = m.factors(1, run), &of_gate = m.factors(matrix, run);
  ColumnPair b;
  u32 own[8];
  float2 sums = make_float2(0, 0);
#pragma unroll 1
  for (int first = 0; first < rank; first += 16) {
    b.load(f, column, first);
    load_ranks(own, of_gate, head, first);
    uint4 low[4];
    const auto place = [&](int i) {
      return has_lows ? (i < 2 ? 1 : matrix) * (rank / 2) + first / 2 + 4 * (i % 2) : -1;
    };
    await_both(v, base, offset, low, lows, place, round);
    b.add(sums, low[0], low[1]);
    gate += dot(own, low[2], low[3]) * kRead;
  }
  ColumnPair::add_slowly(sums, f, column, lows + rank / 2);
  if (!has_whole_rows(of_gate))
    gate += kRead * slow_change(of_gate, head, lows + matrix * (rank / 2));
  return sums;
}

/// Makes the CTA's columns of e.mixed. Returns a history to store when all CTAs have read theirs;
/// without `from`: none.
template <int kRows, bool kChanges>
__device__ __forceinline__ History delta_net(Multiplier<kRows, kChanges>& m,
                                             const DecodeStepLayer& layer,
                                             const DecodeStepRows& rows, const Exchange& e,
                                             const Rounds& round) {
  using P = MixerPart<kRows>;
  constexpr int kWords = P::kColumns / 2, kLanes = P::kColumns / 4;
  constexpr int kValues = 128, kGates = 192;  // first threads of v and of z
  DeltaShared<kRows>& shared = m.shared.delta;
  const P part(m.cta);
  const int thread = m.thread;
  const int64_t slot = rows.slots[part.row];
  float* const own_state =
      layer.states + (slot * Shape::kDeltaHeads + part.head) * int64_t{128 * 128};
  gdn_step::StateTile<128, P::kColumns> state(own_state, part.part * P::kColumns, thread);
  const u32* const inputs = e.inputs + part.row * (kDeltaInputs / 2);
  const int run = m.run_of(part.row), low_words = m.changes.rank / 2;
  const u32* const lows = m.own_lows(e.low_inputs, part.row, 4);
  const bool has_lows = m.has(kOfInputs);
  MixerLows<kRows> out_lows;
  if (m.has(kOfOutput)) out_lows.begin(m.factors(kOutput, run), part.column(), thread);

  History kept{{}, nullptr};
  if (thread < kGates) {
    const int word = thread < kValues ? thread / 64 * (kMixer / 2) + part.head * 64 + thread % 64
                                      : kMixer + part.column() / 2 + thread - kValues;
    if (thread < kValues + kWords) {
      History history{{},
                      static_cast<u32*>(layer.conv_states) + slot * (kChannels * 3 / 2) + word * 3};
      history.load();
      const uint4 taps = __ldg(static_cast<const uint4*>(layer.conv) + word);
      u32 v[1];
      float2 change = make_float2(0, 0);
      if constexpr (kChanges)
        change = await_changed(
            v, inputs, [&](int) { return word; }, m.factors(0, run), 2 * word, lows, has_lows,
            round.kind, m.changes.rank);
      else
        await_words(v, inputs, round.kind, [&](int) { return word; });
      const u32 now =
          pack_bf16((bf16_lo(v[0]) + change.x) * kRead, (bf16_hi(v[0]) + change.y) * kRead);
      const float2 y = history.step(now, taps);
      float* const to = thread < 64        ? shared.step.q + 2 * thread
                        : thread < kValues ? shared.step.k + 2 * (thread - 64)
                                           : shared.v + 2 * (thread - kValues);
      *reinterpret_cast<float2*>(to) = y;
      if (P::kParts == 1 || thread >= kValues)
        history.store();
      else if (part.part == 0)
        kept = history;
    }
  } else {
    const int own = thread - kGates;
    const bool has = own < kWords;
    const float rate = -expf(layer.a_log[part.head]), bias = layer.dt_bias[part.head];
    const u32 weight =
        __ldg(static_cast<const u32*>(layer.norm) + part.part * kWords + (has ? own : 0));
    u32 v[3];
    const int b = 2 * kMixer + part.head / 2, a = b + Shape::kDeltaHeads / 2,
              z = kChannels / 2 + part.column() / 2 + own;
    const auto place = [&](int i) { return i == 0 ? (has ? z : b) : i == 1 ? b : a; };
    const bool odd = part.head % 2;
    const auto of = [&](u32 word) { return kRead * (odd ? bf16_hi(word) : bf16_lo(word)); };
    float2 change = make_float2(0, 0);
    float gate_change = 0;  // of b in the first thread, of a in the second
    if constexpr (kChanges)
      change = await_changed_gates(v, inputs, place, m, run, part.column() + 2 * (has ? own : 0),
                                   2 + own % 2, part.head, lows, has_lows, round.kind, gate_change);
    else
      await_words(v, inputs, round.kind, place);
    if (own == (kChanges ? 1 : 0))
      shared.decay = __expf(rate * softplus(of(v[2]) + gate_change + bias));
    if (own == 0) shared.beta = sigmoid(of(v[1]) + gate_change);
    if (has) {
      const float lo = kRead * (bf16_lo(v[0]) + change.x), hi = kRead * (bf16_hi(v[0]) + change.y);
      shared.gates[2 * own] = bf16_lo(weight) * lo * sigmoid(lo);
      shared.gates[2 * own + 1] = bf16_hi(weight) * hi * sigmoid(hi);
    }
  }
  m.sync();
  const gdn_step::Factors f =
      gdn_step::factors<128>(shared.step.q, shared.step.k, true, 0.08838834764831845f);  // 128^-1/2
  const int own = thread % kLanes * 4;
  const float v[4] = {shared.v[own], shared.v[own + 1], shared.v[own + 2], shared.v[own + 3]};
  state.step(
      shared.step, f, shared.decay, shared.beta, v, [&] { m.sync(); },
      [&](const float4& step) {
        if (!m.has(kOfOutput) && m.warp > 0) return;
        float o[4] = {rounded(step.x), rounded(step.y), rounded(step.z), rounded(step.w)};
        float square = (o[0] * o[0] + o[1] * o[1]) + (o[2] * o[2] + o[3] * o[3]);
        square = lane_sum<kLanes>(square);
        if (thread < kLanes) m.note(part.row, square);
        const float rstd = P::kParts == 1 ? rsqrtf(square / 128 + m.eps) : 1.f;
#pragma unroll
        for (int c = 0; c < 4; ++c) {
          o[c] *= rstd * shared.gates[own + c];
          if (thread < kLanes) m.note(part.row, o[c]);
        }
        if (thread < kLanes)
          store_words(e.mixed + part.row * (kMixer / 2) + part.column() / 2 + 2 * thread,
                      make_word(o[0], o[1], round.layer), make_word(o[2], o[3], round.layer));
        if (P::kParts > 1 && thread == 0)
          store_word(e.squares + (part.row * Shape::kDeltaHeads + part.head) * 8 + part.part,
                     make_word(square, round.kind));
        if (m.has(kOfOutput)) {
          out_lows.write(o, e.low_mixed + part.place() * low_words, low_words, thread, round.layer,
                         [&](float x) { m.note(part.row, x); });
        }
      });
  return kept;
}

/// The norm's factor of row g in a head; to be multiplied with sums of rows 2t and 2t + 1.
template <int kRows, bool kChanges>
__device__ __forceinline__ void apply_head_norm(const Multiplier<kRows, kChanges>& m,
                                                const Exchange& e, u32 round, float (&first)[2],
                                                float (&second)[2]) {
  constexpr int kParts = MixerPart<kRows>::kParts;
  if constexpr (kParts > 1) {
    // A warp's parts of the depth are heads `warp` and 8 + `warp`; lane t has parts t, 4 + t.
    constexpr int N = kParts == 8 ? 2 : 1;
    float squares[2] = {};
    if (m.g < kRows) {
      u32 v[2 * N];
      await_words(v, e.squares + (m.g * Shape::kDeltaHeads + m.warp) * 8, round,
                  [&](int i) { return i / N * 64 + i % N * 4 + m.t % kParts; });
#pragma unroll
      for (int i = 0; i < 2 * N; ++i) squares[i / N] += float_of(v[i]);
    }
    __syncwarp();
    float* const sums[2] = {first, second};
#pragma unroll
    for (int h = 0; h < 2; ++h) {
      squares[h] += __shfl_xor_sync(~0u, squares[h], 1);
      if (kParts > 2) squares[h] += __shfl_xor_sync(~0u, squares[h], 2);
      const float factor = rsqrtf(squares[h] / 128 + m.eps);
#pragma unroll
      for (int i = 0; i < 2; ++i) sums[h][i] *= __shfl_sync(~0u, factor, (8 * m.t + 4 * i) % 32);
    }
  }
}

}  // namespace heddle::ops::cuda::decode
