// The shared memory of a CTA, its ring of slots, and the warp that fills it with all weights of a
// step.
#pragma once

#include "model.h"
#include "ops/decode_step/cuda/words.cuh"

namespace heddle::step_probe {

using namespace ops::cuda;
using namespace ops::cuda::decode;

/// Bytes between rows of a slot: 16-byte loads without conflict.
constexpr int kPitch = 2048 + 64;
constexpr int kSlotBytes = 8 * kPitch;
constexpr int kMostSlots = 13;
constexpr int kMostShared = 227 * 1024;  ///< Bytes of a CTA.

template <int kRows>
constexpr int kRowPitch = kRows == 1 ? 64 : 68;  // floats between rows of a warp's sums
template <int kRows>
constexpr int kSums = kRows == 1 ? 2 : 1;  // copies, so that one is written while one is read
template <int kRows, int kWarps>
struct Shared {
  float sums[kSums<kRows>][kWarps][kRows * kRowPitch<kRows>];
  float squares[2][kWarps][kRows];
  u64 full[kMostSlots], empty[kMostSlots];
};
template <int kRows, int kWarps>
constexpr int kSlotsThatFit =
    (kMostShared - static_cast<int>(sizeof(Shared<kRows, kWarps>))) / kSlotBytes < kMostSlots
        ? (kMostShared - static_cast<int>(sizeof(Shared<kRows, kWarps>))) / kSlotBytes
        : kMostSlots;

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
    if (looks > kMostLooks * 16) __trap();
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

/// The loading warp. Lane i brings row i of a slot from `source`, if it has one.
struct Loader {
  Ring ring;
  u64 policy;
  int lane;
  __device__ __forceinline__ void slot(const bf16* source, int rows, u32 bytes) {
    guarded_wait(ring.empty + 8 * ring.slot, ring.phase ^ 1);
    const u32 full = ring.full + 8 * ring.slot;
    if (lane == 0) mbar_expect(full, rows * bytes);
    __syncwarp();
    if (lane < rows) {
      asm volatile(
          "cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes.L2::cache_hint [%0], "
          "[%1], %2, [%3], %4;" ::"r"(ring.base + ring.slot * kSlotBytes + lane * kPitch),
          "l"(source), "r"(bytes), "r"(full), "l"(policy)
          : "memory");
    }
    ring.next();
  }
  /// Slots of 8 of `columns` rows of 1024, from `matrix` on.
  __device__ __forceinline__ void columns(const bf16* matrix, int slots, int columns) {
    for (int s = 0; s < slots; ++s) {
      const int rows = min(max(columns - 8 * s, 0), 8);
      slot(matrix + static_cast<int64_t>(8 * s + lane) * kWidth, rows, 2 * kWidth);
    }
  }
  /// 8 rows of `depth`, by parts of 1024.
  __device__ __forceinline__ void deep(const bf16* matrix, int depth) {
    for (int k = 0; k < depth; k += 1024)
      slot(matrix + static_cast<int64_t>(lane) * depth + k, 8, 2 * min(1024, depth - k));
  }
  /// A of one adapter: ranks in an order in which a lane's sums are its four of B.
  __device__ __forceinline__ void factor(const bf16* a) {
    const int rank = lane / 2 * 4 + lane % 2;
    slot(a + rank * kWidth, 8, 2 * kWidth);
    slot(a + (rank + 2) * kWidth, 8, 2 * kWidth);
  }
};

/// Brings small tensors of a layer, whose readers load them late, into the L2: norms, B, and A by
/// the columns of the CTA.
template <bool kLora>
__device__ void near(const Model& m, int64_t layer, int lane, const Part& in, const Part& gu) {
  const auto lines = [&](const bf16* from, int numbers) {
    for (int i = lane * 64; i < numbers + 63; i += 32 * 64)
      asm volatile("prefetch.global.L2 [%0];" ::"l"(from + min(i, numbers - 1)) : "memory");
  };
  lines(m.norm_inputs + layer * kWidth, kWidth);
  lines(m.norm_gate_up + layer * kWidth, kWidth);
  if constexpr (kLora) {
    const int64_t cta = blockIdx.x, own = 2 * gu.first, pairs = 2 * gu.count;
    lines(m.b_inputs + (layer * kInputs + 2 * in.first) * kRank, 2 * in.count * kRank);
    lines(m.b_gate_up + (layer * 2 * kInner + own) * kRank, pairs * kRank);
    lines(m.b_gate_up + (layer * 2 * kInner + kInner + own) * kRank, pairs * kRank);
    lines(m.a_down + (layer * kInner + own) * kRank, pairs * kRank);
    if (cta < kWideCtas) {
      lines(m.a_out + (layer * kMixer + 16 * cta) * kRank, 16 * kRank);
      lines(m.b_out + (layer * kWidth + 8 * cta) * kRank, 8 * kRank);
      lines(m.b_down + (layer * kWidth + 8 * cta) * kRank, 8 * kRank);
    }
  }
}

template <bool kLora>
__device__ void load(const Model& m, int layers, Loader& l) {
  const int cta = blockIdx.x;
  const Part in = part_of(kInputs / 2, cta), gu = part_of(kInner / 2, cta);
  const int pairs = 2 * gu.count;
  if (layers > 0) near<kLora>(m, 0, l.lane, in, gu);
  for (int layer = 0; layer < layers; ++layer) {
    if (layer + 1 < layers) near<kLora>(m, layer + 1, l.lane, in, gu);
    l.columns(m.inputs + (static_cast<int64_t>(layer) * kInputs + 2 * in.first) * kWidth, 8,
              2 * in.count);
    if constexpr (kLora) {
      const int last = input_adapter(2 * (in.first + in.count) - 1);
      for (int a = input_adapter(2 * in.first); a <= last; ++a)
        l.factor(m.a_inputs + static_cast<int64_t>(layer * kInputAdapters + a) * kRank * kWidth);
    }
    if (cta < kWideCtas)
      l.deep(m.out + (static_cast<int64_t>(layer) * kWidth + 8 * cta) * kMixer, kMixer);
    const bf16* gate =
        m.gate_up + (static_cast<int64_t>(layer) * 2 * kInner + 2 * gu.first) * kWidth;
    for (int s = 0; s < 7; ++s) {  // columns 0 to 27 are gates, 28 to 55 those of up
      const int column = 8 * s + l.lane, pair = column < 28 ? column : column - 28;
      const bool has = l.lane < 8 && pair < pairs;
      const bf16* source = gate + static_cast<int64_t>(column < 28 ? 0 : kInner) * kWidth;
      // Rows that the CTA lacks are copied from its first, so that slots have 8.
      l.slot(source + static_cast<int64_t>(has ? pair : 0) * kWidth, 8, 2 * kWidth);
    }
    if constexpr (kLora) {
      for (int a = 0; a < 2; ++a)
        l.factor(m.a_gate_up + static_cast<int64_t>(layer * 2 + a) * kRank * kWidth);
    }
    if (cta < kWideCtas)
      l.deep(m.down + (static_cast<int64_t>(layer) * kWidth + 8 * cta) * kInner, kInner);
  }
  const Part head = part_of(kVocabulary / 2, cta);
  for (int c = 0; c < 2 * head.count; c += 64)
    l.columns(m.head + static_cast<int64_t>(2 * head.first + c) * kWidth, 8, 2 * head.count - c);
}

}  // namespace heddle::step_probe
