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

/// A warp's columns of a product, two to a lane, and whether lanes 0 and 4 have a gate each.
struct InputColumns {
  int matrix;
  int column, count;  ///< Columns of the warp.
  bool has_gates;
  int head;  ///< Column of the gates, of matrices 2 and 3.
};
/// Waits for words of a row's inputs: a pair of columns at base + pair, and a gate's at base +
/// gate; what is below 0 is not wanted. Returns what changes add to the pair; what they add to the
/// gate goes to `gate_change`.
template <class M>
__device__ __forceinline__ float2 await_changed(const M& m, u32 (&v)[2], const u32* base, int pair,
                                                int gate, const InputColumns& own, const u32* lows,
                                                int run, u32 round, float& gate_change) {
  const int rank = m.changes.rank, words = rank / 2;
  const bool has_lows = m.has(kOfInputs);
  // Lane group 0 has B and lows of the first gate, 1 those of the second.
  const bool has_gate = own.has_gates && m.g < 2;
  const int gate_matrix = 2 + m.g % 2;
  const SlotFactors &f = m.factors(own.matrix, run), &of_gate = m.factors(gate_matrix, run);
  WarpChanges<4> columns;
  float2 sums = make_float2(0, 0);
  float gates[4] = {};
#pragma unroll 1
  for (int first = 0; first < rank; first += 16) {
    columns.load(f, own.column, own.count, first, m.g, m.t);
    const uint2 b = load_ranks(of_gate, own.head, first + 4 * m.t, has_gate);
    uint2 low[2];
    const auto place = [&](int i) {
      const bool has = has_lows && (i == 0 ? own.count > 0 : has_gate);
      return has ? (i == 0 ? own.matrix : gate_matrix) * words + first / 2 + 2 * m.t : -1;
    };
    await_both(
        v, base, [&](int i) { return i == 0 ? pair : gate; }, low, lows, place, round);
    __syncwarp();
    if (!has_lows) return make_float2(0, 0);
    columns.add(sums, low[0], m.t);
    add_changes(gates, b, make_uint2(0, 0), low[1]);
  }
  gate_change = m.g == 0 ? gates[0] : gates[1];
  if (pair >= 0 && !has_whole_rows(f)) {
#pragma unroll 1
    for (int i = 0; i < 2; ++i)
      (i == 0 ? sums.x : sums.y) +=
          slow_change(f, own.column + 2 * m.lane + i, lows + own.matrix * words);
  }
  if (gate >= 0 && !has_whole_rows(of_gate))
    gate_change += slow_change(of_gate, own.head, lows + gate_matrix * words);
  return sums;
}

/// Word of the inputs of q and k that a thread below 128 has.
__device__ __forceinline__ int query_word(int head, int thread) {
  return thread / 64 * (kMixer / 2) + head * 64 + thread % 64;
}
/// The history of the word's two channels.
__device__ __forceinline__ u32* history_of(const DecodeStepLayer& layer, int64_t slot, int word) {
  return static_cast<u32*>(layer.conv_states) + slot * (kChannels * 3 / 2) + word * 3;
}
/// Stores the histories of q and k when all CTAs of the head have read them.
template <int kRows, class M>
__device__ __forceinline__ void store_kept(const M& m, const DecodeStepLayer& layer,
                                           const DecodeStepRows& rows) {
  using P = MixerPart<kRows>;
  const P part(m.cta);
  if (P::kParts == 1 || layer.is_attention || m.cta >= kWideCtas || part.part != 0 ||
      m.thread >= 128)
    return;
  u32* const to = history_of(layer, rows.slots[part.row], query_word(part.head, m.thread));
#pragma unroll
  for (int i = 0; i < 3; ++i) to[i] = m.shared.delta.kept[i][m.thread];
}

/// Makes the CTA's columns of e.mixed; store_kept() follows.
template <int kRows, bool kChanges>
__device__ __forceinline__ void delta_net(Multiplier<kRows, kChanges>& m,
                                          const DecodeStepLayer& layer, const DecodeStepRows& rows,
                                          const Exchange& e, const Rounds& round) {
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
  const int run = m.run_of(part.row);
  const u32* const lows = m.own_lows(e.low_inputs, part.row, 4);
  MixerLows<kRows> out_lows;
  if (m.has(kOfOutput)) out_lows.begin(m.factors(kOutput, run), part.column(), thread);

  // A thread has a pair of columns: of q, k, v, which a convolution follows, or of z. The first and
  // the fifth of z have b and a of the head too.
  const bool is_z = thread >= kGates;
  const int own = thread - kGates, own_z = kChannels / 2 + part.column() / 2 + own;
  const bool has = thread < kValues + kWords || (is_z && own < kWords),
             is_gate = is_z && (own == 0 || own == 4);
  const int word = is_z               ? own_z
                   : thread < kValues ? query_word(part.head, thread)
                                      : kMixer + part.column() / 2 + thread - kValues;
  History history{{}, history_of(layer, slot, word)};
  uint4 taps = make_uint4(0, 0, 0, 0);
  u32 weight = 0;
  float rate = 0, bias = 0;
  if (has && !is_z) {
    history.load();
    taps = __ldg(static_cast<const uint4*>(layer.conv) + word);
  } else if (has) {
    weight = __ldg(static_cast<const u32*>(layer.norm) + part.part * kWords + own);
    if (is_gate) rate = -expf(layer.a_log[part.head]), bias = layer.dt_bias[part.head];
  }
  const int pair = has ? word : -1,
            gate = is_gate ? 2 * kMixer + (part.head + (own > 0 ? Shape::kDeltaHeads : 0)) / 2 : -1;
  u32 v[2];
  float2 change = make_float2(0, 0);
  float gate_change = 0;
  if constexpr (kChanges) {
    const int first_thread = thread - m.lane, warps_first = is_z ? kGates : kValues;
    const int lanes =
        first_thread < kValues ? 32 : min(max(kWords - (first_thread - warps_first), 0), 32);
    const int first_column =
        is_z ? part.column() + 2 * (first_thread - kGates) : 2 * (word - m.lane);
    change = await_changed(m, v, inputs, pair, gate,
                           {is_z, first_column, 2 * lanes, m.warp == kGates / 32, part.head}, lows,
                           run, round.kind(), gate_change);
  } else {
    u32 none[1];
    await_both(
        v, inputs, [&](int i) { return i == 0 ? pair : gate; }, none, inputs,
        [](int) { return -1; }, round.kind());
  }
  const float lo = kRead * (bf16_lo(v[0]) + change.x), hi = kRead * (bf16_hi(v[0]) + change.y);
  if (has && !is_z) {
    const float2 y = history.step(pack_bf16(lo, hi), taps);
    float* const to = thread < 64        ? shared.step.q + 2 * thread
                      : thread < kValues ? shared.step.k + 2 * (thread - 64)
                                         : shared.v + 2 * (thread - kValues);
    *reinterpret_cast<float2*>(to) = y;
    if (P::kParts == 1 || thread >= kValues)
      history.store();
    else
#pragma unroll
      for (int i = 0; i < 3; ++i) shared.kept[i][thread] = history.before[i];
  } else if (has) {
    shared.gates[2 * own] = bf16_lo(weight) * lo * sigmoid(lo);
    shared.gates[2 * own + 1] = bf16_hi(weight) * hi * sigmoid(hi);
    if (is_gate) {
      const float x = kRead * ((part.head % 2 ? bf16_hi(v[1]) : bf16_lo(v[1])) + gate_change);
      if (own == 0)
        shared.beta = sigmoid(x);
      else
        shared.decay = __expf(rate * softplus(x + bias));
    }
  }
  m.sync();
  const gdn_step::Factors f =
      gdn_step::factors<128>(shared.step.q, shared.step.k, true, 0.08838834764831845f);  // 128^-1/2
  const int at = thread % kLanes * 4;
  const float values[4] = {shared.v[at], shared.v[at + 1], shared.v[at + 2], shared.v[at + 3]};
  state.step(
      shared.step, f, shared.decay, shared.beta, values, [&] { m.sync(); },
      [&](const float4& step) {
        if (!m.has(kOfOutput) && m.warp > 0) return;
        float o[4] = {rounded(step.x), rounded(step.y), rounded(step.z), rounded(step.w)};
        float square = (o[0] * o[0] + o[1] * o[1]) + (o[2] * o[2] + o[3] * o[3]);
        square = lane_sum<kLanes>(square);
        if (thread < kLanes) m.note(part.row, square);
        const float rstd = P::kParts == 1 ? rsqrtf(square / 128 + m.eps) : 1.f;
#pragma unroll
        for (int c = 0; c < 4; ++c) {
          o[c] *= rstd * shared.gates[at + c];
          if (thread < kLanes) m.note(part.row, o[c]);
        }
        if (thread < kLanes)
          store_words(e.mixed + part.row * (kMixer / 2) + part.column() / 2 + 2 * thread,
                      make_word(o[0], o[1], round.layer()), make_word(o[2], o[3], round.layer()));
        if (P::kParts > 1 && thread == 0)
          store_word(e.squares + (part.row * Shape::kDeltaHeads + part.head) * 8 + part.part,
                     make_word(square, round.kind()));
        if (m.has(kOfOutput)) {
          out_lows.write(o, e.low_mixed, part.place(), m.changes.rank / 2, thread, round.layer(),
                         [&](float x) { m.note(part.row, x); });
        }
      });
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
