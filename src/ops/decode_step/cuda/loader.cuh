// The shared memory of a CTA, its ring of slots, and the warp that fills it with all weights of a
// step.
#pragma once

#include "ops/decode_step/cuda/changes.cuh"
#include "ops/gated_delta_net/cuda/decode_state.cuh"

namespace heddle::ops::cuda::decode {

/// Bytes between rows of a slot: 16-byte loads without conflict.
constexpr int kPitch = 2048 + 64;
constexpr int kSlotBytes = 8 * kPitch;
constexpr int kMostShared = 227 * 1024;  ///< Bytes of a CTA.

/// Floats between rows of a warp's sums.
template <int kRows, bool kChanges>
constexpr int kRowPitch = (kRows == 1 ? 64 : 68) + (kChanges ? kMostLows : 0);
template <int kRows>
constexpr int kSums = kRows == 1 ? 2 : 1;  // copies, so that one is written while one is read

template <int kRows>
struct DeltaShared {
  gdn_step::Shared<128, MixerPart<kRows>::kColumns> step;
  float v[MixerPart<kRows>::kColumns];
  float gates[MixerPart<kRows>::kColumns];  // of the outputs, times the norm's weights
  float decay, beta;
};
struct AttentionShared {
  float outputs[kWarps / 2][kGroup][Shape::kHeadDim];
  float2 sums[kWarps / 2][kGroup];
};
struct JoinShared {
  float outputs[kThreads];
  float2 sums[kThreads];
};
/// Queries, key and value of a row and a key head, with their changes.
struct QueryShared {
  u32 words[(kGroup + 2) * Shape::kHeadDim / 2];
};
static_assert(sizeof(QueryShared) <= sizeof(JoinShared));
template <int kRows, bool kChanges>
struct Shared {
  float sums[kSums<kRows>][kWarps][kRows * kRowPitch<kRows, kChanges>];
  float squares[2][kWarps][kRows];
  union {
    DeltaShared<kRows> delta;
    AttentionShared attention;
  };
  union {
    JoinShared join;
    QueryShared queries;
  };
  u64 full[16], empty[16];
  ChangesShared<kRows, kChanges> changes;
};
template <int kRows, bool kChanges>
constexpr int kSlots =
    (kMostShared - static_cast<int>(sizeof(Shared<kRows, kChanges>))) / kSlotBytes;

__device__ __forceinline__ void guarded_wait(u32 bar, u32 phase) {
  for (int looks = 0;; ++looks) {
    u32 done;
    asm volatile(
        "{.reg .pred p; mbarrier.try_wait.parity.shared::cta.b64 p, [%1], %2; selp.u32 %0, 1, 0, "
        "p;}"
        : "=r"(done)
        : "r"(bar), "r"(phase)
        : "memory");
    if (done) return;
    if (looks > kMostLooks * 8) give_up();
  }
}
/// Place in the ring; the loading warp and the others go through the same slots in the same order.
struct Ring {
  u32 base, full, empty;
  int count, slot = 0;
  u32 phase = 0;
  __device__ __forceinline__ void next() {
    if (++slot == count) slot = 0, phase ^= 1;
  }
};

/// `bytes` and `from` are multiples of 16.
__device__ __forceinline__ void bring_near(const void* from, u32 bytes) {
  asm volatile("cp.async.bulk.prefetch.L2.global [%0], %1;" ::"l"(__cvta_generic_to_global(from)),
               "r"(bytes)
               : "memory");
}

/// The loading warp. Lane i brings row i of a slot from `source`, if it has one.
template <int kRows, bool kChanges>
struct Loader {
  Ring ring;
  u64 policy;
  int lane, cta;
  const DecodeStepModel& model;
  const DecodeStepRows& rows;
  const typename ChangesOf<kChanges>::Type& changes;
  ChangesShared<kRows, kChanges>& known;

  __device__ __forceinline__ void slot(const bf16* source, int count, u32 bytes) {
    slot(source, count, bytes, lane < count);
  }
  __device__ __forceinline__ void slot(const bf16* source, int count, u32 bytes, bool has) {
    guarded_wait(ring.empty + 8 * ring.slot, ring.phase ^ 1);
    const u32 full = ring.full + 8 * ring.slot;
    if (lane == 0) mbar_expect(full, count * bytes);
    __syncwarp();
    if (has) {
      asm volatile(
          "cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes.L2::cache_hint [%0], "
          "[%1], %2, [%3], %4;" ::"r"(ring.base + ring.slot * kSlotBytes + lane * kPitch),
          "l"(source), "r"(bytes), "r"(full), "l"(policy)
          : "memory");
    }
    ring.next();
  }
  /// Slots of 8 of `count` rows of the width; row i is at source(i).
  template <class Source>
  __device__ __forceinline__ void narrow(int slots, int count, const Source& source) {
    for (int s = 0; s < slots; ++s) {
      const int own = min(max(count - 8 * s, 0), 8);
      slot(source(8 * s + min(lane, 7)), own, 2 * kWidth);
    }
  }
  /// The CTA's 8 rows of `depth`, by parts of 1024.
  __device__ __forceinline__ void wide(const void* matrix, int depth) {
    const bf16* const own =
        static_cast<const bf16*>(matrix) + (static_cast<int64_t>(8) * cta + min(lane, 7)) * depth;
    for (int k = 0; k < depth; k += 1024) slot(own + k, 8, 2 * min(1024, depth - k));
  }
  static __device__ __forceinline__ const bf16* row_of(const void* matrix, int row) {
    return static_cast<const bf16*>(matrix) + static_cast<int64_t>(row) * kWidth;
  }

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

  /// Asks for the factors of layer `l`; they are there after the wait for the next layer's.
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
  /// The CTA's columns of the lows of a product, two rows of A each.
  __device__ __forceinline__ void lows(int l, int first, int matrices) {
    const int words = changes.rank / 2;
    const Part own = lows_of(changes, matrices, cta);
    for (int c = 0; c < own.count; c += 4) {
      const int at = c + lane / 2;
      const bf16* source = nullptr;
      if (lane < 8 && at < own.count) {
        const LowPair pair(own.first + at, matrices, words);
        const SlotFactors& f = known.factors[l % kKnownLayers][first + pair.matrix][pair.run];
        const int rank = 2 * pair.word + lane % 2;
        if (rank < f.rank) source = row_of(f.a, rank);
      }
      slot(source, __popc(__ballot_sync(~0u, source != nullptr)), 2 * kWidth, source != nullptr);
    }
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
    for (int i = lane; i < changes.count * changes.rank; i += 32) {
      const SlotFactors& f = factors[kDown][i / changes.rank];
      const int rank = i % changes.rank;
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
    for (int l = 0; l < model.layers; ++l) {
      const DecodeStepLayer& layer = model.layer[l];
      if constexpr (kChanges) {
        forget_values(lane, cta);
        cp_async_wait<0>();
        __syncwarp();
        if (l + 1 < model.layers) ask_for_factors(l + 1);
      }
      near(layer);
      if constexpr (kChanges) bring_factors(l);
      if (layer.is_attention) {
        const Part own = part_of(kAttentionInputs / 2, cta);
        narrow(5, 2 * own.count, [&](int i) {
          const int column = 2 * own.first + i;
          return column < 2 * kMixer ? row_of(layer.inputs[0], column)
                 : column < 2 * kMixer + kKeys
                     ? row_of(layer.inputs[1], column - 2 * kMixer)
                     : row_of(layer.inputs[2], column - 2 * kMixer - kKeys);
        });
      } else {
        const Part own = part_of(kDeltaInputs / 2, cta);
        narrow(8, 2 * own.count, [&](int i) {
          const int column = 2 * own.first + i, gates = column - 4 * kMixer;
          return column < kChannels           ? row_of(layer.inputs[0], column)
                 : gates < 0                  ? row_of(layer.inputs[1], column - kChannels)
                 : gates < Shape::kDeltaHeads ? row_of(layer.inputs[2], gates)
                                              : row_of(layer.inputs[3], gates - Shape::kDeltaHeads);
        });
      }
      if constexpr (kChanges) lows(l, 0, layer.is_attention ? 3 : 4);
      if (cta < kWideCtas) wide(layer.out, kMixer);
      // Columns 0 to 27 are gates, 28 to 55 those of up; rows that the CTA lacks are copied from
      // its first, so that slots have 8.
      const Part own = part_of(kInner / 2, cta);
      narrow(7, 56, [&](int i) {
        const int pair = i < 28 ? i : i - 28;
        return row_of(i < 28 ? layer.gate : layer.up,
                      2 * own.first + (pair < 2 * own.count ? pair : 0));
      });
      if constexpr (kChanges) lows(l, kGate, 2);
      if (cta < kWideCtas) wide(layer.down, kInner);
    }
    const Part head = part_of(model.vocabulary / 2, cta);
    for (int c = 0; c < 2 * head.count; c += 64)
      narrow(8, 2 * head.count - c, [&](int i) {
        // Rows past the last are not copied.
        return row_of(model.head, 2 * head.first + c + i);
      });
  }
};

}  // namespace heddle::ops::cuda::decode
