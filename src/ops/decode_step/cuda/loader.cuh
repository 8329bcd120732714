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
  u32 kept[3][128];                         // words of a history that is stored later
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
    uint4 norm[kWarps][16];  ///< Weights of a norm, each warp's part; with changes.
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

/// Where the loading warp and the scout wait for each other, at the beginning of a layer: what the
/// scout has found out is there.
__device__ __forceinline__ void meet_scout() { named_sync(2, 64); }

/// Slots of a narrow product that come before those of its lows: registers for these are few while
/// a product's weights wait in them.
template <bool kChanges>
constexpr int kSlotsBeforeLows = kChanges ? 5 : 8;

/// The loading warp. Lane i brings row i of a slot from `source`, if it has one.
template <int kRows, bool kChanges>
struct Loader {
  Ring ring;
  u64 policy;
  int lane, cta;
  const DecodeStepModel& model;
  const typename ChangesOf<kChanges>::Type& changes;
  const ChangesShared<kRows, kChanges>& known;

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
  /// Slots of 8 of `count` rows of the width; row i is at source(i). Those of lows() are among
  /// them.
  template <class Source, class Lows>
  __device__ __forceinline__ void narrow(int slots, int count, const Source& source,
                                         const Lows& lows) {
#pragma unroll 1
    for (int s = 0;; ++s) {
      if (kChanges && s == min(slots, kSlotsBeforeLows<kChanges>)) lows();
      if (s == slots) break;
      const int own = min(max(count - 8 * s, 0), 8);
      slot(source(8 * s + min(lane, 7)), own, 2 * kWidth, lane < own);
    }
  }
  /// The CTA's 8 rows of `depth`, by parts of 1024.
  __device__ __forceinline__ void wide(const void* matrix, int depth) {
    if (cta >= kWideCtas) return;
    const bf16* const own =
        static_cast<const bf16*>(matrix) + (static_cast<int64_t>(8) * cta + min(lane, 7)) * depth;
#pragma unroll 1
    for (int k = 0; k < depth; k += 1024) slot(own + k, 8, 2 * min(1024, depth - k), lane < 8);
  }
  static __device__ __forceinline__ const bf16* row_of(const void* matrix, int row) {
    return static_cast<const bf16*>(matrix) + static_cast<int64_t>(row) * kWidth;
  }
  /// The CTA's columns of the lows of a product, two rows of A each.
  __device__ __forceinline__ void lows(int l, unsigned group, int first, int matrices) {
    if constexpr (kChanges) {
      const int words = changes.rank / 2;
      const Part own = lows_of(changes, group, matrices, cta);
#pragma unroll 1
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
  }

  /// Rows of matrices that follow each other, those of number i before ends[i].
  struct Stack {
    const void* matrices[4];
    int ends[3];
    __device__ __forceinline__ const bf16* row(int i) const {
      const void* matrix = matrices[0];
      int first = 0;
#pragma unroll
      for (int m = 0; m < 3; ++m)
        if (i >= ends[m]) matrix = matrices[m + 1], first = ends[m];
      return row_of(matrix, i - first);
    }
  };
  /// Slots of the mixer's inputs, or of gate and up, with their lows. One copy of the code, as that
  /// of products().
  __device__ __forceinline__ void inputs(int l, bool is_gated) {
    const DecodeStepLayer& layer = model.layer[l];
    constexpr int kNone = 1 << 30;
    Stack stack{{layer.inputs[0], layer.inputs[1], layer.inputs[2], layer.inputs[3]},
                {kChannels, 4 * kMixer, 4 * kMixer + Shape::kDeltaHeads}};
    int slots = 8, words = kDeltaInputs / 2, first_matrix = 0, matrices = 4;
    unsigned group = kOfInputs;
    if (is_gated) {
      stack.matrices[0] = layer.gate, stack.matrices[1] = layer.up;
      stack.ends[0] = kInner, stack.ends[1] = stack.ends[2] = kNone;
      slots = 7, words = kInner / 2, group = kOfGated, first_matrix = kGate, matrices = 2;
    } else if (layer.is_attention) {
      stack.ends[0] = 2 * kMixer, stack.ends[1] = 2 * kMixer + kKeys, stack.ends[2] = kNone;
      slots = 5, words = kAttentionInputs / 2, group = kOfAttention, matrices = 3;
    }
    const Part own = part_of(words, cta);
    narrow(
        slots, is_gated ? 56 : 2 * own.count,
        [&](int i) {
          // Columns 0 to 27 are gates, 28 to 55 those of up; rows that the CTA lacks are copied
          // from its first, so that slots have 8.
          const bool is_up = is_gated && i >= 28;
          const int column = is_up ? i - 28 : i;
          return stack.row((is_up ? kInner : 0) + 2 * own.first +
                           (is_gated && column >= 2 * own.count ? 0 : column));
        },
        [&] { lows(l, group, first_matrix, matrices); });
  }

  __device__ void run() {
#pragma unroll 1
    for (int l = 0; l < model.layers; ++l) {
      meet_scout();
#pragma unroll 1
      for (int half = 0; half < 2; ++half) {
        inputs(l, half == 1);
        const DecodeStepLayer& layer = model.layer[l];
        wide(half == 1 ? layer.down : layer.out, half == 1 ? kInner : kMixer);
      }
    }
    const Part head = part_of(model.vocabulary / 2, cta);
#pragma unroll 1
    for (int c = 0; c < 2 * head.count; c += 64)
      narrow(
          8, 2 * head.count - c,
          [&](int i) {
            // Rows past the last are not copied.
            return row_of(model.head, 2 * head.first + c + i);
          },
          [] {});
  }
};

}  // namespace heddle::ops::cuda::decode
