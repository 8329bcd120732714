// The mixer of an attention layer: norms and rotation of queries and keys, the new key and value in
// their page, attention over the pages, output gate.
//
// A CTA attends with the query heads of one key head of one row to a part of its keys, and hands on
// outputs that are not yet divided; then it joins the parts of its columns of the mixer's output. A
// warp takes a key at a time, a lane 8 numbers of it; the first keys are on their way before the
// inputs are looked for.
#pragma once

#include "ops/decode_step/cuda/delta_net.cuh"

namespace heddle::ops::cuda::decode {

/// 8 numbers of a head that a warp has: norm and rotation of the first kRotaryDim, rounded.
struct Rotation {
  float cos[8], sin[8];  // of a lane's numbers; sin carries the sign
  __device__ __forceinline__ void load(const DecodeStepRows& rows, int position, int lane) {
    constexpr int kHalf = Shape::kRotaryDim / 2;
#pragma unroll
    for (int i = 0; i < 8; ++i) cos[i] = 1, sin[i] = 0;
    if (lane >= Shape::kRotaryDim / 8) return;
    const int64_t at = int64_t{position} * kHalf + lane % (kHalf / 8) * 8;
#pragma unroll
    for (int i = 0; i < 8; i += 4) {
      const float4 c = __ldg(reinterpret_cast<const float4*>(rows.cos + at + i)),
                   s = __ldg(reinterpret_cast<const float4*>(rows.sin + at + i));
      cos[i] = c.x, cos[i + 1] = c.y, cos[i + 2] = c.z, cos[i + 3] = c.w;
      sin[i] = s.x, sin[i + 1] = s.y, sin[i + 2] = s.z, sin[i + 3] = s.w;
    }
    if (lane < kHalf / 8) {
#pragma unroll
      for (int i = 0; i < 8; ++i) sin[i] = -sin[i];
    }
  }
  __device__ __forceinline__ void apply(float (&x)[8], const uint4& weights, float offset,
                                        float eps) const {
    float squares = 0;
#pragma unroll
    for (int i = 0; i < 8; ++i) squares += x[i] * x[i];
    const float rstd = rsqrtf(lane_sum(squares) / Shape::kHeadDim + eps);
    const u32 w[4] = {weights.x, weights.y, weights.z, weights.w};
#pragma unroll
    for (int i = 0; i < 8; ++i)
      x[i] *= rstd * (offset + (i % 2 ? bf16_hi(w[i / 2]) : bf16_lo(w[i / 2])));
#pragma unroll
    for (int i = 0; i < 8; ++i) {
      const float other = __shfl_xor_sync(~0u, x[i], Shape::kRotaryDim / 16);
      x[i] = rounded(x[i] * cos[i] + other * sin[i]);
    }
  }
};

__device__ __forceinline__ void unpack(const uint4& v, float (&x)[8], float scale = 1) {
  const u32 w[4] = {v.x, v.y, v.z, v.w};
#pragma unroll
  for (int i = 0; i < 4; ++i)
    x[2 * i] = bf16_lo(w[i]) * scale, x[2 * i + 1] = bf16_hi(w[i]) * scale;
}
__device__ __forceinline__ uint4 packed(const float (&x)[8]) {
  return make_uint4(pack_bf16(x[0], x[1]), pack_bf16(x[2], x[3]), pack_bf16(x[4], x[5]),
                    pack_bf16(x[6], x[7]));
}

/// The largest score of some keys in units of log 2, the sum of their exponentials relative to it,
/// and the sum of their values with these weights.
struct Running {
  /// No score is as low, and differences of scores from it are finite.
  static constexpr float kNone = -0x1p60f;
  float largest = kNone, sum = 0, o[8] = {};
};
/// The CTA's part of the keys.
template <int kRows, bool kChanges>
struct KeyReader {
  static constexpr int kAhead = 2;  ///< Keys that a warp computes with at once.
  static constexpr float kScoreScale = 0.0625f * 1.4426950408889634f;  ///< D^-1/2 log2(e).
  const Multiplier<kRows, kChanges>& m;
  const DecodeStepLayer& layer;
  KeyPlaces place_of;
  int before, first;  ///< Keys in the cache; the part's first.
  int count;          ///< The part's keys, the new one among them.
  uint4 new_key, new_value;
  uint4 k[kAhead], v[kAhead];

  /// Past the last key that one again. The new one's place is read too, and what it holds not used.
  __device__ __forceinline__ void fetch(int base) {
#pragma unroll
    for (int n = 0; n < kAhead; ++n) {
      const int64_t place = place_of(first + min(base + n * kWarps, count - 1));
      k[n] = *reinterpret_cast<const uint4*>(static_cast<const bf16*>(layer.keys) + place);
      v[n] = *reinterpret_cast<const uint4*>(static_cast<const bf16*>(layer.values) + place);
    }
  }
  __device__ __forceinline__ void attend(const float (&q)[kGroup][8], Running (&run)[kGroup]) {
#pragma unroll 1
    for (int base = m.warp; base < count; base += kWarps * kAhead) {
      uint4 now_k[kAhead], now_v[kAhead];
#pragma unroll
      for (int n = 0; n < kAhead; ++n) {
        const bool takes_new = first + min(base + n * kWarps, count - 1) == before;
        now_k[n] = takes_new ? new_key : k[n], now_v[n] = takes_new ? new_value : v[n];
      }
      fetch(base + kWarps * kAhead);
      float scores[kAhead][kGroup];
#pragma unroll
      for (int n = 0; n < kAhead; ++n) {
        float key[8];
        unpack(now_k[n], key);
#pragma unroll
        for (int h = 0; h < kGroup; ++h) {
          float s = 0;
#pragma unroll
          for (int i = 0; i < 8; ++i) s += q[h][i] * key[i];
          s = lane_sum(s) * kScoreScale;
          scores[n][h] = base + n * kWarps < count ? s : Running::kNone;
        }
      }
#pragma unroll
      for (int h = 0; h < kGroup; ++h) {
        float most = run[h].largest;  // The first of the keys is one.
#pragma unroll
        for (int n = 0; n < kAhead; ++n) most = fmaxf(most, scores[n][h]);
        const float kept = exp2_fast(run[h].largest - most);
        run[h].largest = most;
        run[h].sum *= kept;
#pragma unroll
        for (int i = 0; i < 8; ++i) run[h].o[i] *= kept;
#pragma unroll
        for (int n = 0; n < kAhead; ++n) {
          scores[n][h] = exp2_fast(scores[n][h] - most);
          run[h].sum += scores[n][h];
        }
      }
#pragma unroll
      for (int n = 0; n < kAhead; ++n) {
        float value[8];
        unpack(now_v[n], value);
#pragma unroll
        for (int h = 0; h < kGroup; ++h) {
#pragma unroll
          for (int i = 0; i < 8; ++i) run[h].o[i] += scores[n][h] * value[i];
        }
      }
    }
  }
};

/// Queries of a key head's group, its key and value with their changes, into shared memory; all
/// threads have a part of them.
template <class M>
__device__ __forceinline__ void await_changed_queries(M& m, const Exchange& e, int row, int head,
                                                      u32 round) {
  constexpr int D = Shape::kHeadDim, N = (kGroup + 2) * D / 2 / kThreads;
  static_assert(N == 3 && 2 * kThreads == kGroup * D / 2);
  const int rank = m.changes.rank, run = m.run_of(row), thread = m.thread;
  const u32* const lows = m.own_lows(e.low_attention, row, 4);
  const bool has_lows = m.has(kOfAttention);
  // Two words of queries, one of the key or the value.
  const int last = 1 + thread / (D / 2);
  const auto place = [&](int i) {
    const int at = i * kThreads + thread, h = at / (D / 2);
    return i < 2 ? (head * kGroup + h) * D + at % (D / 2)
                 : kMixer + (last - 1) * (kKeys / 2) + head * (D / 2) + thread % (D / 2);
  };
  const int matrix[N] = {0, 0, last}, column[N] = {2 * (place(0) - m.lane), 2 * (place(1) - m.lane),
                                                   head * D + (thread - m.lane) % (D / 2) * 2};
  u32 v[N];
  WarpChanges<4> changes[N];
  float2 sums[N] = {};
#pragma unroll 1
  for (int first = 0; first < rank; first += 16) {
#pragma unroll
    for (int i = 0; i < N; ++i)
      changes[i].load(m.factors(matrix[i], run), column[i], 64, first, m.g, m.t);
    uint2 low[2];
    await_both(
        v, e.attention + row * (kAttentionInputs / 2), place, low, lows,
        [&](int i) {
          return has_lows ? (i == 0 ? 0 : last) * (rank / 2) + first / 2 + 2 * m.t : -1;
        },
        round);
    __syncwarp();
#pragma unroll
    for (int i = 0; i < N; ++i) changes[i].add(sums[i], low[i / 2], m.t);
  }
#pragma unroll
  for (int i = 0; i < N; ++i) {
    const SlotFactors& f = m.factors(matrix[i], run);
    if (has_whole_rows(f)) continue;
#pragma unroll 1
    for (int k = 0; k < 2; ++k)
      (k == 0 ? sums[i].x : sums[i].y) +=
          slow_change(f, column[i] + 2 * m.lane + k, lows + matrix[i] * (rank / 2));
  }
  u32* const shared = m.shared.queries.words;
#pragma unroll
  for (int i = 0; i < N; ++i)
    shared[i * kThreads + thread] =
        pack_bf16((bf16_lo(v[i]) + sums[i].x) * kRead, (bf16_hi(v[i]) + sums[i].y) * kRead);
  m.sync();
}

/// Writes the CTA's part of e.outputs and e.sums.
template <int kRows, bool kChanges>
__device__ __forceinline__ void attend(Multiplier<kRows, kChanges>& m, const DecodeStepLayer& layer,
                                       const DecodeStepRows& rows, const Exchange& e,
                                       const Rounds& round) {
  using P = KeyPart<kRows>;
  constexpr int D = Shape::kHeadDim;
  const P part(m.cta);
  const int before = static_cast<int>(rows.lengths[part.row]), total = before + 1,
            each = P::keys_of(total);
  const int index = (part.row * Shape::kKeyHeads + part.head) * P::kParts + part.part;
  u32* const outputs = e.outputs + index * kGroup * D;
  u32* const sums = e.sums + index * kGroup * 2;
  if (part.part * each >= total) {  // The words still go on to this round.
    const u32 none = make_word(0, round.kind());
    for (int i = 2 * m.thread; i < kGroup * D; i += 2 * kThreads)
      store_words(outputs + i, none, none);
    if (m.thread < kGroup * 2) store_word(sums + m.thread, none);
    return;
  }
  KeyReader<kRows, kChanges> reader{m, layer, {rows, part.row, part.head, 8 * m.lane}};
  reader.before = before;
  reader.first = part.part * each;
  reader.count = min(each, total - reader.first);
  reader.fetch(m.warp);
  Rotation rotation;
  rotation.load(rows, before, m.lane);
  // A warp brings one of the queries, the key or the value into its form, for all.
  const int own = m.warp;
  const uint4 weights =
      __ldg(static_cast<const uint4*>(own < kGroup ? layer.q_norm : layer.k_norm) + m.lane);
  u32* const shared_words = m.shared.queries.words;
  constexpr float kScale = kChanges ? 1.f : kRead;
  if constexpr (kChanges) await_changed_queries(m, e, part.row, part.head, round.kind());
  if (own < kGroup + 2) {
    auto* const to = reinterpret_cast<uint4*>(shared_words + own * (D / 2) + 4 * m.lane);
    uint4 in[1];
    if constexpr (kChanges)
      in[0] = *to;
    else
      await_words(
          in, e.attention + part.row * (kAttentionInputs / 2) + 4 * m.lane, round.kind(), [&](int) {
            return own < kGroup ? (part.head * kGroup + own) * D
                                : kMixer + part.head * (D / 2) + (own > kGroup ? kKeys / 2 : 0);
          });
    __syncwarp();
    float x[8];
    unpack(in[0], x, kScale);
    if (own <= kGroup) rotation.apply(x, weights, m.offset, m.eps);
    *to = packed(x);
  }
  m.sync();
  const auto words_of = [&](int i) {
    return *reinterpret_cast<const uint4*>(shared_words + i * (D / 2) + 4 * m.lane);
  };
  float q[kGroup][8];
#pragma unroll
  for (int h = 0; h < kGroup; ++h) unpack(words_of(h), q[h]);
  reader.new_key = words_of(kGroup);
  reader.new_value = words_of(kGroup + 1);
  const int newest = before - reader.first;
  if (newest < reader.count && newest % kWarps == m.warp) {
    const int64_t place = reader.place_of(before);
    st_global16(static_cast<bf16*>(layer.keys) + place, reader.new_key);
    st_global16(static_cast<bf16*>(layer.values) + place, reader.new_value);
  }
  Running run[kGroup];
  reader.attend(q, run);

  // The warps' sums: 4 and 4, then all.
  AttentionShared& shared = m.shared.attention;
  const int pair = m.warp % (kWarps / 2);
  const auto put = [&] {
#pragma unroll
    for (int h = 0; h < kGroup; ++h) {
      auto* const to = reinterpret_cast<float4*>(&shared.outputs[pair][h][8 * m.lane]);
      to[0] = make_float4(run[h].o[0], run[h].o[1], run[h].o[2], run[h].o[3]);
      to[1] = make_float4(run[h].o[4], run[h].o[5], run[h].o[6], run[h].o[7]);
      if (m.lane == 0) shared.sums[pair][h] = make_float2(run[h].largest, run[h].sum);
    }
  };
  if (m.warp >= kWarps / 2) put();
  m.sync();
  if (m.warp < kWarps / 2) {
#pragma unroll
    for (int h = 0; h < kGroup; ++h) {
      const float2 other = shared.sums[pair][h];
      const auto* const from =
          reinterpret_cast<const float4*>(&shared.outputs[pair][h][8 * m.lane]);
      const float4 a = from[0], b = from[1];
      const float theirs[8] = {a.x, a.y, a.z, a.w, b.x, b.y, b.z, b.w};
      const float most = fmaxf(run[h].largest, other.x);
      const float mine = exp2_fast(run[h].largest - most), weight = exp2_fast(other.x - most);
      run[h].largest = most;
      run[h].sum = run[h].sum * mine + other.y * weight;
#pragma unroll
      for (int i = 0; i < 8; ++i) run[h].o[i] = run[h].o[i] * mine + theirs[i] * weight;
    }
    __syncwarp();
    put();
  }
  m.sync();
  // A thread has four numbers of a head.
  static_assert(kThreads * 4 == kGroup * D);
  const int h = m.thread / (D / 4), element = m.thread % (D / 4) * 4;
  float most = Running::kNone, sum = 0, o[4] = {};
#pragma unroll
  for (int w = 0; w < kWarps / 2; ++w) most = fmaxf(most, shared.sums[w][h].x);
#pragma unroll
  for (int w = 0; w < kWarps / 2; ++w) {
    const float2 part_sum = shared.sums[w][h];
    const float weight = exp2_fast(part_sum.x - most);
    sum += part_sum.y * weight;
    const float4 v = *reinterpret_cast<const float4*>(&shared.outputs[w][h][element]);
    o[0] += v.x * weight, o[1] += v.y * weight, o[2] += v.z * weight, o[3] += v.w * weight;
  }
#pragma unroll
  for (int i = 0; i < 4; i += 2) {
    m.note(part.row, o[i]), m.note(part.row, o[i + 1]);
    store_words(outputs + h * D + element + i, make_word(o[i], round.kind()),
                make_word(o[i + 1], round.kind()));
  }
  if (element == 0)
    store_words(sums + 2 * h, make_word(most, round.kind()), make_word(sum, round.kind()));
}

/// Joins the parts of the CTA's columns of e.mixed.
template <int kRows, bool kChanges>
__device__ __forceinline__ void join(Multiplier<kRows, kChanges>& m, const DecodeStepRows& rows,
                                     const Exchange& e, const Rounds& round) {
  using P = MixerPart<kRows>;
  using K = KeyPart<kRows>;
  constexpr int D = Shape::kHeadDim, C = P::kColumns, kGroups = kThreads / C,
                N = K::kParts / kGroups;  // parts of a thread, one after the other
  static_assert(N * kGroups == K::kParts);
  const P part(m.cta);
  const int column = m.thread % C, which = m.thread / C, at = part.column() + column, head = at / D;
  const int parts = K::parts_of(static_cast<int>(rows.lengths[part.row]) + 1);
  const int first =
      (part.row * Shape::kKeyHeads + head / kGroup) * K::kParts * kGroup + head % kGroup;
  // Parts without keys are not waited for: part 0 is there in any case.
  const auto place = [&](int i) {
    const int s = which + i * kGroups;
    return (s < parts ? s : 0) * kGroup;
  };
  // The gate first, which is there before the parts.
  const bool finishes = m.thread < (C + 31) / 32 * 32;  ///< Threads of the columns.
  u32 gate[1] = {0};
  [[maybe_unused]] float change = 0;
  if (finishes) {
    const u32* const inputs = e.attention + part.row * (kAttentionInputs / 2);
    const auto place = [&](int) { return head * D + D / 2 + at % D / 2; };
    if constexpr (kChanges) {
      const int rank = m.changes.rank;
      const bool has_lows = m.has(kOfAttention);
      const SlotFactors& f = m.factors(0, m.run_of(part.row));
      const u32* const lows = m.own_lows(e.low_attention, part.row, 4);
      const int first_column = head * 2 * D + D + (at - column % 32) % D;
      WarpChanges<2> changes;
#pragma unroll 1
      for (int first = 0; first < rank; first += 16) {
        changes.load(f, first_column, min(C, 32), first, m.g, m.t);
        uint2 low[1];
        await_both(
            gate, inputs, place, low, lows,
            [&](int) { return has_lows ? first / 2 + 2 * m.t : -1; }, round.kind());
        __syncwarp();
        changes.add(change, low[0], m.t);
      }
      if (!has_whole_rows(f)) change += slow_change(f, first_column + column % 32, lows);
    } else {
      await_words(gate, inputs, round.kind(), place);
    }
  }
  MixerLows<kRows> lows;
  if (m.has(kOfOutput)) lows.begin(m.factors(kOutput, m.run_of(part.row)), part.column(), m.thread);
  u32 o[N];
  uint2 sums[N];
  await_both(
      o, e.outputs + first * D + at % D, [&](int i) { return place(i) * D; }, sums,
      e.sums + first * 2, [&](int i) { return place(i) * 2; }, round.kind());
  float most = Running::kNone, sum = 0, output = 0;
#pragma unroll
  for (int i = 0; i < N; ++i) {
    if (which + i * kGroups < parts) most = fmaxf(most, float_of(sums[i].x));
  }
#pragma unroll
  for (int i = 0; i < N; ++i) {
    const float weight = which + i * kGroups < parts ? exp2_fast(float_of(sums[i].x) - most) : 0.f;
    sum += float_of(sums[i].y) * weight;
    output += float_of(o[i]) * weight;
  }
  JoinShared& shared = m.shared.join;
  shared.outputs[m.thread] = output;
  shared.sums[m.thread] = make_float2(most, sum);
  m.sync();
  if (finishes) {
    most = Running::kNone, sum = output = 0;
#pragma unroll
    for (int i = 0; i < kGroups; ++i) most = fmaxf(most, shared.sums[column + i * C].x);
#pragma unroll
    for (int i = 0; i < kGroups; ++i) {
      const float2 other = shared.sums[column + i * C];
      const float weight = exp2_fast(other.x - most);
      sum += other.y * weight;
      output += shared.outputs[column + i * C] * weight;
    }
    const float own_gate = at % 2 ? bf16_hi(gate[0]) : bf16_lo(gate[0]);
    const float y =
        rounded(output / sum) * sigmoid(kRead * (kChanges ? own_gate + change : own_gate));
    if (m.thread < C) m.note(part.row, y);
    const float next = __shfl_down_sync(~0u, y, 1);
    if (m.thread < C && column % 2 == 0)
      store_word(e.mixed + part.row * (kMixer / 2) + at / 2, make_word(y, next, round.layer()));
    if constexpr (kChanges) {
      if (m.thread < C) m.shared.changes.mixed[column] = y;
    }
  }
  if constexpr (kChanges) {
    if (!m.has(kOfOutput)) return;
    m.sync();
    const float4 y =
        reinterpret_cast<const float4*>(m.shared.changes.mixed)[m.thread % lows.kLanes];
    const float o[4] = {y.x, y.y, y.z, y.w};
    lows.write(o, e.low_mixed, part.place(), m.changes.rank / 2, m.thread, round.layer(),
               [&](float x) { m.note(part.row, x); });
  }
}

}  // namespace heddle::ops::cuda::decode
