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

  /// Brings what the readers of a layer load late into the L2.
  __device__ __forceinline__ void near(const DecodeStepLayer& layer) {
    if (lane == 0) bring_near(layer.norm_mixer, 2 * kWidth);
    if (lane == 1) bring_near(layer.norm_mlp, 2 * kWidth);
    if (cta >= kWideCtas) return;
    if (layer.is_attention) {
      const KeyPart<kRows> part(cta);
      const int64_t total = rows.lengths[part.row] + 1, each = part.keys_of(total),
                    first = part.part * each, last = min(first + min(each, int64_t{64}), total - 1);
      for (int64_t key = first + lane; key < last; key += 32) {
        const int64_t page = rows.pages[part.row * rows.table_pages + key / rows.page_tokens];
        const int64_t place =
            ((page * rows.page_tokens + key % rows.page_tokens) * Shape::kKeyHeads + part.head) *
            Shape::kHeadDim;
        bring_near(static_cast<const bf16*>(layer.keys) + place, 2 * Shape::kHeadDim);
        bring_near(static_cast<const bf16*>(layer.values) + place, 2 * Shape::kHeadDim);
      }
      return;
    }
    const MixerPart<kRows> part(cta);
    const int64_t slot = rows.slots[part.row];
    if (lane >= 2 && lane < 8) {
      const int which = lane % 3;
      const int64_t channel = which * kMixer + (which == 2 ? part.column() : part.head * 128);
      const u32 channels = which == 2 ? part.kColumns : 128;
      if (lane < 5)
        bring_near(static_cast<const bf16*>(layer.conv) + channel * 4, channels * 8);
      else
        bring_near(static_cast<const bf16*>(layer.conv_states) + (slot * kChannels + channel) * 3,
                   channels * 6);
    }
    const float* const state = layer.states + (slot * Shape::kDeltaHeads + part.head) * 128 * 128 +
                               part.part * part.kColumns;
    for (int k = lane; k < 128; k += 32) bring_near(state + k * 128, 4 * part.kColumns);
  }

  /// Asks for the factors of layer `l`; they are there when it has waited for them.
  __device__ __forceinline__ void ask_for_factors(int l) {
    for (int i = lane; i < kMatrices * kRows; i += 32) {
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
    const DecodeStepLayer& layer = model.layer[l];
    const auto& factors = known.factors[l % kKnownLayers];
    const Part gated = part_of(kInner / 2, cta);
    if (lane < 2 * kRows)
      bring_rows(factors[kGate + lane % 2][lane / 2], 2 * gated.first, 2 * gated.count);
    // Columns of A begin anywhere on 4 bytes.
    const int rank_bits = __ffs(changes.rank) - 1;
#pragma unroll 1
    for (int i = lane; i < changes.count * changes.rank; i += 32) {
      const SlotFactors& f = factors[kDown][i >> rank_bits];
      const int rank = i & (changes.rank - 1);
      if (rank >= f.rank) continue;
      const int at = 2 * (rank * kInner + 2 * gated.first);
      bring_near(static_cast<const char*>(f.a) + at / 16 * 16,
                 static_cast<u32>((at % 16 + 4 * gated.count + 15) / 16 * 16));
    }
    if (cta >= kWideCtas) return;
    if (lane < 2 * kRows) bring_rows(factors[lane % 2 ? kDown : kOutput][lane / 2], 8 * cta, 8);
    const MixerPart<kRows> part(cta);
    const int run = known.run_of_row[part.row];
    const SlotFactors& out = factors[kOutput][run];
#pragma unroll 1
    for (int rank = lane; rank < out.rank; rank += 32)
      bring_near(static_cast<const bf16*>(out.a) + rank * kMixer + part.column(),
                 2 * part.kColumns);
    if (layer.is_attention) {
      const KeyPart<kRows> keys(cta);
      if (keys.part >= keys.parts_of(rows.lengths[part.row] + 1) && lane != 6) return;
      constexpr int D = Shape::kHeadDim;
      if (lane < kGroup) bring_rows(factors[0][run], (keys.head * kGroup + lane) * 2 * D, D);
      if (lane == 4 || lane == 5) bring_rows(factors[lane - 3][run], keys.head * D, D);
      if (lane == 6)
        bring_rows(factors[0][run], part.column() / D * 2 * D + D + part.column() % D,
                   part.kColumns);
      return;
    }
    if (lane < 2) bring_rows(factors[0][run], lane * kMixer + part.head * 128, 128);
    if (lane == 2) bring_rows(factors[0][run], 2 * kMixer + part.column(), part.kColumns);
    if (lane == 3) bring_rows(factors[1][run], part.column(), part.kColumns);
    if (lane == 4 || lane == 5) bring_rows(factors[lane - 2][run], part.head, 1);
  }

  __device__ void run() {
    if constexpr (kChanges) ask_for_factors(0);
#pragma unroll 1
    for (int l = 0; l < model.layers; ++l) {
      forget_values(lane, cta);
      if constexpr (kChanges) {
        cp_async_wait<0>();
        __syncwarp();
      }
      meet_scout();
      if constexpr (kChanges) {
        if (l + 1 < model.layers) ask_for_factors(l + 1);
      }
      near(model.layer[l]);
      if constexpr (kChanges) bring_factors(l);
    }
  }
};

}  // namespace heddle::ops::cuda::decode
