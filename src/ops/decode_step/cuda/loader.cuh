// The shared memory of a CTA, its ring of slots, and the warp that fills it with all weights of a
// step.
#pragma once

#include "ops/decode_step/cuda/layout.cuh"
#include "ops/gated_delta_net/cuda/decode_state.cuh"

namespace heddle::ops::cuda::decode {

/// Bytes between rows of a slot: 16-byte loads without conflict.
constexpr int kPitch = 2048 + 64;
constexpr int kSlotBytes = 8 * kPitch;
constexpr int kMostShared = 227 * 1024;  ///< Bytes of a CTA.

template <int kRows>
constexpr int kRowPitch = kRows == 1 ? 64 : 68;  // floats between rows of a warp's sums
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
template <int kRows>
struct Shared {
  float sums[kSums<kRows>][kWarps][kRows * kRowPitch<kRows>];
  float squares[2][kWarps][kRows];
  union {
    DeltaShared<kRows> delta;
    AttentionShared attention;
  };
  JoinShared join;
  u64 full[16], empty[16];
};
template <int kRows>
constexpr int kSlots = (kMostShared - static_cast<int>(sizeof(Shared<kRows>))) / kSlotBytes;

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
    if (looks > kMostLooks * 8) __trap();
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
template <int kRows>
struct Loader {
  Ring ring;
  u64 policy;
  int lane, cta;
  const DecodeStepModel& model;
  const DecodeStepRows& rows;

  __device__ __forceinline__ void slot(const bf16* source, int count, u32 bytes) {
    guarded_wait(ring.empty + 8 * ring.slot, ring.phase ^ 1);
    const u32 full = ring.full + 8 * ring.slot;
    if (lane == 0) mbar_expect(full, count * bytes);
    __syncwarp();
    if (lane < count) {
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

  __device__ void run() {
    for (int l = 0; l < model.layers; ++l) {
      const DecodeStepLayer& layer = model.layer[l];
      near(layer);
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
      if (cta < kWideCtas) wide(layer.out, kMixer);
      // Columns 0 to 27 are gates, 28 to 55 those of up; rows that the CTA lacks are copied from
      // its first, so that slots have 8.
      const Part own = part_of(kInner / 2, cta);
      narrow(7, 56, [&](int i) {
        const int pair = i < 28 ? i : i - 28;
        return row_of(i < 28 ? layer.gate : layer.up,
                      2 * own.first + (pair < 2 * own.count ? pair : 0));
      });
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
