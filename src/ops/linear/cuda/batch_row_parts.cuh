// Stages of the products of a batch's rows (batch_rows.cu says how the launch goes): what a CTA
// works on, its ring in shared memory, and the warps that load, scale and multiply.
#pragma once

#include "ops/cuda/cta_pair.cuh"
#include "ops/cuda/dependent_launch.cuh"
#include "ops/cuda/mma.cuh"
#include "ops/linear/cuda/batch_row_changes.cuh"

namespace heddle::ops::cuda::batch_row {

constexpr int kDepth = 64, kScalers = 4, kMostSplit = 8, kGroupColumns = 64;
constexpr int kNarrowColumns = 144;  ///< A tile of three groups has at most, if it is narrow.
constexpr u32 kColumnBytes = kDepth * 2;

/// Distance of the first columns of two multiplying warpgroups, a multiple of 8. They have
/// kGroupColumns each, some of which both have if a tile has fewer.
constexpr __host__ __device__ int columns_between(int columns, int groups) {
  return groups > 1 ? (columns - kGroupColumns) / (groups - 1) : 0;
}

/// Rows whose changes a CTA has. kShallow: at most half of them, as it shares the depth;
/// kDeep: all; kNarrow: all, in tiles of at most kNarrowColumns, which leave more to the ring.
enum class Changes { kNone, kShallow, kDeep, kNarrow };

/// kRows: of a, rounded up; kGroups: multiplying warpgroups.
template <int kRows, int kGroups, Changes kChanges>
struct Layout {
  static constexpr bool kIsChanged = kChanges != Changes::kNone;
  static constexpr int kWriters = (kGroups * 4 + kScalers) * 32;  ///< Threads that write sums out.
  /// Whether one more warp asks for bytes. Where it would leave changing warps too few registers
  /// the first one that multiplies does.
  static constexpr bool kHasLoader = !kIsChanged || kGroups == 1;
  static constexpr int kFirstChanger = kWriters + (kHasLoader ? 32 : 0);
  static constexpr int kThreads = kFirstChanger + (kIsChanged ? kChangers * 32 : 0);
  static constexpr int kColumns =
      kChanges == Changes::kNarrow ? kNarrowColumns : kGroups * kGroupColumns;
  static constexpr int kPitch = kColumns + 4;  ///< Floats of a row of the sums on the way out.
  static constexpr u32 kRowBytes = kRows * kDepth * 2;
  static constexpr u32 kStageBytes = kColumns * kColumnBytes + kRowBytes;
  /// Slots of a changing warp. The ring has what they leave.
  static constexpr int kUnits = kChanges == Changes::kNarrow                   ? 1
                                : kChanges == Changes::kShallow && kGroups > 2 ? 3
                                                                               : 2;
  /// Rows whose changes a CTA has: with kShallow at least two share them.
  static constexpr int kChangedRows = kChanges == Changes::kShallow ? kRows / 2 : kRows;
  /// Changing warps ask for A before they look at their tile. With fewer groups that is slower.
  static constexpr bool kAsksEarly = kGroups > 2;
  static constexpr int kLowSteps = steps_of_part(kGroups, kChanges == Changes::kShallow);
  using Changed = ChangedTile<kPitch, kUnits, kLowSteps>;
  using Shared = ChangeShared<kUnits, kLowSteps, slot_of(kPitch)>;
  static constexpr u32 kChangeBytes =
      kIsChanged ? kChangedRows * kPitch * 4 + sizeof(Shared) + 128 : 0;
  /// Registers a thread, of 80, of all warps but the changing ones and of these; 0: all keep them.
  static constexpr int kKeptRegisters = kIsChanged && kGroups > 2 ? 72 : 0, kTakenRegisters = 96;
  /// CTAs of a multiprocessor.
  static constexpr int kResident = kGroups > 2 || kIsChanged ? 1 : 2;
  /// An even number: a scaling warp has every second block, and so must see each use of its stages,
  /// as a barrier tells only one use from the next.
  static constexpr int kStages =
      ((kIsChanged ? 226 : 200) * 1024 / kResident - kChangeBytes) / kStageBytes / 2 * 2;
  static constexpr u32 kBarriers = kStages * kStageBytes;
  static constexpr u32 kSquares = (kBarriers + 3 * kStages * 8 + 15) / 16 * 16;
  static constexpr u32 kFactors = kSquares + 2 * kRows * 4;
  static constexpr u32 kChangeSums = kFactors + kRows * 4;
  static constexpr u32 kShared = (kChangeSums + kChangedRows * kPitch * 4 + 127) / 128 * 128;
  static constexpr u32 kBytes = kChangeSums + kChangeBytes;
  static_assert(kBytes + 1024 <= 227 * 1024 && kStages >= 4);
  static_assert(kRows * kPitch * 4 <= kBarriers);
};

/// Outputs of the second of two sums that are one; none: null.
struct Twin {
  void* y;
  int64_t y_stride;
};

struct Arguments {
  LowParts lows;  ///< The changes'.
  CUtensorMap rows_map, maps[kMostFewRowSums + 1];
  few_row::Arguments few;  ///< first_block: tiles.
  int map_of[kMostFewRowSums];
  Twin twins[kMostFewRowSums];
  bool is_wide[kMostFewRowSums];  ///< Four elements of y and start are 8 bytes of memory.
  int columns;                    ///< Width of a tile; see columns_between().
  int split;                      ///< CTAs of a cluster, which share the depth of a tile.
};

#if defined(__CUDA_ARCH_FEAT_SM90_ALL)

/// Registers that changing warps take from the others, where all have too few for A of a part.
template <class L>
__device__ __forceinline__ void give_registers() {
  if constexpr (L::kKeptRegisters > 0) set_max_registers_down<L::kKeptRegisters>();
}
template <class L>
__device__ __forceinline__ void take_registers() {
  if constexpr (L::kKeptRegisters > 0) set_max_registers_up<L::kTakenRegisters>();
}

/// A CTA's work: blocks [begin, begin + steps) of the depth for columns [first, first + columns) of
/// a sum or, if it has halves, of both.
struct Work {
  const Arguments& p;
  const few_row::Arguments& few;
  const FewRowSum& sum;
  int which, columns, first, begin, steps, rank;

  __device__ __forceinline__ bool has_halves() const { return sum.up != nullptr; }
};

/// The ring and its barriers, by block of the CTA's work.
template <int kRows, int kGroups, Changes kChanges>
struct Ring {
  using L = Layout<kRows, kGroups, kChanges>;
  u32 base;

  static __device__ __forceinline__ int stage(int i) { return i % L::kStages; }
  static __device__ __forceinline__ int phase(int i) { return i / L::kStages & 1; }
  __device__ __forceinline__ u32 matrix(int i) const { return base + stage(i) * L::kStageBytes; }
  __device__ __forceinline__ u32 rows(int i) const {
    return matrix(i) + L::kColumns * kColumnBytes;
  }
  __device__ __forceinline__ u32 full(int i) const { return base + L::kBarriers + stage(i) * 8; }
  __device__ __forceinline__ u32 scaled(int i) const { return full(i) + L::kStages * 8; }
  __device__ __forceinline__ u32 empty(int i) const { return full(i) + 2 * L::kStages * 8; }
  __device__ __forceinline__ void init() const {
    for (int s = 0; s < L::kStages; ++s) {
      mbar_init(full(s), 1);
      mbar_init(scaled(s), 2);
      mbar_init(empty(s), kGroups * 4);
    }
    fence_cluster_barriers();
  }
};

/// Stages that are asked for before the changes' A, for which other CTAs' lows wait.
constexpr int kBeforeLows = 2;

/// A box of a matrix, which is read once.
__device__ __forceinline__ void load_box_once(u32 to, const CUtensorMap* map, int x, int y,
                                              u32 barrier) {
  asm volatile(
      "cp.async.bulk.tensor.2d.shared::cluster.global.mbarrier::complete_tx::bytes.L2::cache_hint "
      "[%0], [%1, {%2, %3}], [%4], %5;" ::"r"(to),
      "l"(map), "r"(x), "r"(y), "r"(barrier), "l"(read_once())
      : "memory");
}

template <int kRows, int kGroups, Changes kChanges>
__device__ __forceinline__ void load_matrix(const Work& work,
                                            const Ring<kRows, kGroups, kChanges>& ring, int i) {
  const int depth = (work.begin + i) * kDepth;
  const CUtensorMap* const map = &work.p.maps[work.p.map_of[work.which]];
  mbar_expect(ring.full(i),
              work.p.columns * kColumnBytes + Layout<kRows, kGroups, kChanges>::kRowBytes);
  if constexpr (Layout<kRows, kGroups, kChanges>::kIsChanged) {
    load_box_once(ring.matrix(i), map, depth, work.first, ring.full(i));
    if (work.has_halves())
      load_box_once(ring.matrix(i) + work.columns * kColumnBytes, map + 1, depth, work.first,
                    ring.full(i));
    return;
  }
  bulk_load_box(ring.matrix(i), map, depth, work.first, ring.full(i));
  if (work.has_halves())
    bulk_load_box(ring.matrix(i) + work.columns * kColumnBytes, map + 1, depth, work.first,
                  ring.full(i));
}
template <int kRows, int kGroups, Changes kChanges>
__device__ __forceinline__ void load_rows(const Work& work,
                                          const Ring<kRows, kGroups, kChanges>& ring, int i) {
  bulk_load_box(ring.rows(i), &work.p.rows_map, (work.begin + i) * kDepth, 0, ring.full(i));
}
/// One thread asks for the first blocks [begin, ...) that the ring holds, and for the rows of all
/// of these when they are there, which it says to the barrier `released`.
template <int kRows, int kGroups, Changes kChanges>
__device__ __forceinline__ void load_first(const Work& work,
                                           const Ring<kRows, kGroups, kChanges>& ring, int begin,
                                           u32 released) {
  using L = Layout<kRows, kGroups, kChanges>;
  const int early = min(work.steps, L::kStages);
  for (int i = begin; i < early; ++i) load_matrix(work, ring, i);
  wait_for_previous();
  if constexpr (L::kIsChanged) mbar_arrive(released);
  for (int i = 0; i < early; ++i) load_rows(work, ring, i);
}
/// One thread asks for block `i` in the place of one that all are done with.
template <int kRows, int kGroups, Changes kChanges>
__device__ __forceinline__ void load_next(const Work& work,
                                          const Ring<kRows, kGroups, kChanges>& ring, int i) {
  mbar_wait(ring.empty(i), ring.phase(i) ^ 1);
  load_matrix(work, ring, i);
  load_rows(work, ring, i);
}

/// The norm's weights of a lane's 8 places of a block, on their way a block ahead: a load from
/// memory takes longer than the rest of a block.
struct NormWeights {
  uint4 bits[2];

  __device__ __forceinline__ void fetch(const Work& work, int i, int place) {
    const FewRowNorm& norm = work.few.norm;
    const int column = (work.begin + i) * kDepth + place;
    bits[0] = bits[1] = {0, 0, 0, 0};
    if (i >= work.steps || column >= work.few.depth) return;
    const bool is_half = norm.weight_type == Element::kBFloat16;
    const uint4* const from = reinterpret_cast<const uint4*>(
        static_cast<const unsigned char*>(norm.weight) + column * (is_half ? 2 : 4));
    bits[0] = __ldg(from);
    if (!is_half) bits[1] = __ldg(from + 1);
  }
  /// Offset and weights.
  __device__ __forceinline__ void read(const FewRowNorm& norm, float (&x)[8]) const {
    if (norm.weight_type == Element::kBFloat16) {
      unpack(FewRowVector{{bits[0].x, bits[0].y, bits[0].z, bits[0].w}}, x);
    } else {
      const u32 words[8] = {bits[0].x, bits[0].y, bits[0].z, bits[0].w,
                            bits[1].x, bits[1].y, bits[1].z, bits[1].w};
#pragma unroll
      for (int e = 0; e < 8; ++e) x[e] = __uint_as_float(words[e]);
    }
#pragma unroll
    for (int e = 0; e < 8; ++e) x[e] += norm.offset;
  }
};

/// A warp's half of the rows of every second block, times the norm's weight. A lane has 8 elements
/// of every fourth of these rows.
template <int kRows, int kGroups, Changes kChanges>
__device__ __forceinline__ void scale(const Work& work, const Ring<kRows, kGroups, kChanges>& ring,
                                      float* squares) {
  constexpr int kOwn = kRows / 2, kVectors = kOwn / 4;
  const FewRowNorm& norm = work.few.norm;
  const int scaler = static_cast<int>(threadIdx.x) / 32 - kGroups * 4, lane = threadIdx.x % 32,
            place = lane % 8 * 8, line = scaler % 2 * kOwn + lane / 8;
  float square[kVectors] = {};
  NormWeights next;
  next.fetch(work, scaler / 2, place);
  for (int i = scaler / 2; i < work.steps; i += 2) {
    float weight[8];
    next.read(norm, weight);
    next.fetch(work, i + 2, place);
    mbar_wait(ring.full(i), ring.phase(i));
#pragma unroll
    for (int j = 0; j < kVectors; ++j) {
      const u32 at = tile_address(ring.rows(i), kRows, line + j * 4, place);
      const uint4 bits = ld_shared16(at);
      FewRowVector v{{bits.x, bits.y, bits.z, bits.w}};
      float x[8];
      unpack(v, x);
#pragma unroll
      for (int e = 0; e < 8; ++e) square[j] += x[e] * x[e], x[e] *= weight[e];
      v = pack<bf16>(x);
      asm volatile("st.shared.v4.u32 [%0], {%1, %2, %3, %4};" ::"r"(at), "r"(v.words[0]),
                   "r"(v.words[1]), "r"(v.words[2]), "r"(v.words[3])
                   : "memory");
    }
    fence_async_proxy();
    __syncwarp();
    if (lane == 0) mbar_arrive(ring.scaled(i));
  }
#pragma unroll
  for (int j = 0; j < kVectors; ++j) {
    float sum = square[j];
#pragma unroll
    for (int step = 1; step < 8; step *= 2) sum += __shfl_xor_sync(0xffffffffu, sum, step);
    if (lane % 8 == 0) squares[scaler / 2 * kRows + line + j * 4] = sum;
  }
}

/// The products of the CTA's blocks of the depth, to `sums` [kRows, kPitch].
template <int kRows, int kGroups, Changes kChanges>
__device__ __forceinline__ void multiply(const Work& work,
                                         const Ring<kRows, kGroups, kChanges>& ring, float* sums) {
  using L = Layout<kRows, kGroups, kChanges>;
  const int group = threadIdx.x / 128, warp = threadIdx.x / 32 % 4, lane = threadIdx.x % 32;
  const bool is_normed = work.few.norm.weight != nullptr;
  const int between = columns_between(work.p.columns, kGroups), first = group * between,
            known = group > 0 ? kGroupColumns - between : 0;  // columns that another group has too
  float acc[kRows / 8][4];
  for (int i = 0; i < work.steps; ++i) {
    mbar_wait(ring.full(i), ring.phase(i));
    if (is_normed) mbar_wait(ring.scaled(i), ring.phase(i));
    const u64 a = make_descriptor(ring.matrix(i) + first * kColumnBytes),
              b = make_descriptor(ring.rows(i));
    MmaHopper::fence();
#pragma unroll
    for (int k = 0; k < kDepth / 16; ++k)
      wgmma_ss<0, 0>(acc, a + ((k * 32) >> 4), b + ((k * 32) >> 4), i > 0 || k > 0);
    MmaHopper::commit();
    // At once and not behind the next block's, which may be long in coming: the place of this one
    // is one more that is under way.
    if constexpr (L::kIsChanged) {
      MmaHopper::wait<0>();
      if (lane == 0) mbar_arrive(ring.empty(i));
    } else {
      MmaHopper::wait<1>();
      if (i > 0 && lane == 0) mbar_arrive(ring.empty(i - 1));
    }
    if constexpr (!L::kHasLoader) {
      const int next = i + L::kStages;
      if (threadIdx.x == 0 && next < work.steps) load_next(work, ring, next);
    }
  }
  MmaHopper::wait<0>();
  pin(acc);
  named_sync(1, kGroups * 128);  // all have read the ring, in whose place the sums lie
#pragma unroll
  for (int n = 0; n < kRows / 8; ++n) {
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      const int column = warp * 16 + i / 2 * 8;
      if (column >= known)
        sums[(n * 8 + lane % 4 * 2 + i % 2) * L::kPitch + first + column + lane / 4] = acc[n][i];
    }
  }
}

#endif

}  // namespace heddle::ops::cuda::batch_row
