// The warp that goes ahead of the loading warp: it finds the factors of a layer, and brings what
// the multiplying warps load late near.
#pragma once

#include "ops/decode_step/cuda/loader.cuh"

namespace heddle::ops::cuda::decode {

/// `bytes` and `from` are multiples of 16.
__device__ __forceinline__ void bring_near(const void* from, u32 bytes) {
  asm volatile("cp.async.bulk.prefetch.L2.global [%0], %1;" ::"l"(__cvta_generic_to_global(from)),
               "r"(bytes)
               : "memory");
}

template <int kRows, bool kChanges>
struct Scout {
  int lane, cta;
  const DecodeStepModel& model;
  const DecodeStepRows& rows;
  const typename ChangesOf<kChanges>::Type& changes;
  ChangesShared<kRows, kChanges>& known;

  /// Brings what the readers of a layer load late into the L2. Each copy is a loop over lanes in
  /// the code, so lanes choose first what they copy.
  __device__ __forceinline__ void near(const DecodeStepLayer& layer) {
    if (lane < 2) bring_near(lane == 0 ? layer.norm_mixer : layer.norm_mlp, 2 * kWidth);
    if (cta >= kWideCtas) return;
    if (layer.is_attention) {
      const KeyPart<kRows> part(cta);
      const KeyPlaces place_of(rows, part.row, part.head, 0);
      const int total = static_cast<int>(rows.lengths[part.row]) + 1, each = part.keys_of(total),
                first = part.part * each, last = min(first + min(each, 64), total - 1);
      const int kind = lane % 2;
#pragma unroll 1
      for (int key = first + lane / 2; key < last; key += 16)
        bring_near(static_cast<const bf16*>(kind == 0 ? layer.keys : layer.values) + place_of(key),
                   2 * Shape::kHeadDim);
      return;
    }
    const MixerPart<kRows> part(cta);
    const int64_t slot = rows.slots[part.row];
    const float* const state = layer.states + (slot * Shape::kDeltaHeads + part.head) * 128 * 128 +
                               part.part * part.kColumns;
    // Rows of the state, then taps and histories of q, k and v.
#pragma unroll 1
    for (int i = lane; i < 128 + 6; i += 32) {
      const int which = (i - 128) >> 1;
      const int64_t channel = which * kMixer + (which == 2 ? part.column() : part.head * 128);
      const u32 channels = which == 2 ? part.kColumns : 128;
      const void* from = state + i * 128;
      u32 bytes = 4 * part.kColumns;
      if (i >= 128) {
        from = i % 2 == 0
                   ? static_cast<const bf16*>(layer.conv) + channel * 4
                   : static_cast<const bf16*>(layer.conv_states) + (slot * kChannels + channel) * 3;
        bytes = channels * (i % 2 == 0 ? 8 : 6);
      }
      bring_near(from, bytes);
    }
  }

  /// Asks for the factors of layer `l`; they are there when it has waited for them.
  __device__ __forceinline__ void ask_for_factors(int l) {
#pragma unroll 1
    for (unsigned i = lane; i < kMatrices * kRows; i += 32) {
      const int matrix = i % kMatrices, run = i / kMatrices;
      SlotFactors& to = known.factors[l % kKnownLayers][matrix][run];
      const SlotFactors* const table = changes.slots[l][matrix];
      const SlotRun& of = known.runs[run];
      if (table == nullptr || of.rows == 0 || of.slot < 0) {
        to = {};
        continue;
      }
      const auto* const from = reinterpret_cast<const u64*>(table + of.slot);
#pragma unroll
      for (int word = 0; word < 3; ++word)
        asm volatile("cp.async.ca.shared.global [%0], [%1], 8;" ::"r"(smem_u32(&to) + 8 * word),
                     "l"(from + word)
                     : "memory");
    }
    cp_async_commit();
  }
  /// Brings `count` rows of B from `first` on into the L2, whole pieces of 16 bytes around them.
  static __device__ __forceinline__ void bring_rows(const SlotFactors& f, int first, int count) {
    if (f.rank == 0 || count == 0) return;
    const int64_t from = int64_t{2} * first * f.rank / 16 * 16,
                  to = (int64_t{2} * (first + count) * f.rank + 15) / 16 * 16;
    bring_near(static_cast<const char*>(f.b) + from, static_cast<u32>(to - from));
  }
  /// Brings what the readers load of a layer's factors into the L2.
  __device__ __forceinline__ void bring_factors(int l) {
    const bool is_attention = model.layer[l].is_attention, is_wide = cta < kWideCtas;
    const auto& factors = known.factors[l % kKnownLayers];
    const Part gated = part_of(kInner / 2, cta);
    const MixerPart<kRows> part(cta);
    const int mixer_run = known.run_of_row[part.row];
    // Rows of B: of gate and up, the output and the down product by run, then of the mixer's
    // inputs.
    constexpr int kByRun = 4 * kRows;
#pragma unroll 1
    for (int i = lane; i < kByRun + 8; i += 32) {
      int matrix = i % 4 + kOutput, run = i / 4, first = 8 * cta, count = is_wide ? 8 : 0;
      if (i >= kByRun) {
        run = mixer_run;
        mixer_rows(i - kByRun, is_attention, part, matrix, first, count);
      } else if (matrix == kGate || matrix == kUp) {
        first = 2 * gated.first, count = 2 * gated.count;
      }
      bring_rows(factors[matrix][run], first, count);
    }
    // Columns of A of the down product by run, of the output product; they begin anywhere on 4
    // bytes.
    const int rank_bits = __ffs(changes.rank) - 1, by_run = changes.count << rank_bits,
              all = by_run + (is_wide ? changes.rank : 0);
#pragma unroll 1
    for (int i = lane; i < all; i += 32) {
      const bool is_down = i < by_run;
      const SlotFactors& f = is_down ? factors[kDown][i >> rank_bits] : factors[kOutput][mixer_run];
      const int rank = i & (changes.rank - 1);
      if (rank >= f.rank) continue;
      const int at =
                    2 * (is_down ? rank * kInner + 2 * gated.first : rank * kMixer + part.column()),
                bytes = is_down ? 4 * gated.count : 2 * part.kColumns;
      bring_near(static_cast<const char*>(f.a) + at / 16 * 16,
                 static_cast<u32>((at % 16 + bytes + 15) / 16 * 16));
    }
  }
  /// Rows of B, number `i` below 8, of the columns of the mixer's inputs that the CTA reads.
  __device__ __forceinline__ void mixer_rows(int i, bool is_attention, const MixerPart<kRows>& part,
                                             int& matrix, int& first, int& count) const {
    count = 0;
    if (cta >= kWideCtas) return;
    if (is_attention) {
      constexpr int D = Shape::kHeadDim;
      const KeyPart<kRows> keys(cta);
      const bool has_keys = keys.part < keys.parts_of(static_cast<int>(rows.lengths[part.row]) + 1);
      matrix = i == 4 || i == 5 ? i - 3 : 0;
      first = i < 4   ? (keys.head * kGroup + i) * 2 * D
              : i < 6 ? keys.head * D
                      : part.column() / D * 2 * D + D + part.column() % D;
      count = i < 6 ? (has_keys ? D : 0) : i == 6 ? part.kColumns : 0;
      return;
    }
    matrix = i < 3 ? 0 : i < 6 ? i - 2 : 0;
    first = i < 2   ? i * kMixer + part.head * 128
            : i < 4 ? (i == 2 ? 2 * kMixer : 0) + part.column()
                    : part.head;
    count = i < 2 ? 128 : i < 4 ? part.kColumns : i < 6 ? 1 : 0;
  }

  __device__ void run() {
#pragma unroll 1
    for (int l = 0;; ++l) {
      forget_values(lane, cta);
      if constexpr (kChanges) {
        if (l < model.layers) ask_for_factors(l);
      }
      if (l > 0) {
        near(model.layer[l - 1]);
        if constexpr (kChanges) bring_factors(l - 1);
      }
      if (l == model.layers) break;
      if constexpr (kChanges) {
        cp_async_wait<0>();
        __syncwarp();
      }
      meet_scout();
    }
  }
};

}  // namespace heddle::ops::cuda::decode
