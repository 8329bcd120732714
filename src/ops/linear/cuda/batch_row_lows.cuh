// Lows of the low-rank changes of a batch's rows (batch_row_changes.cuh says what becomes of them).
//
// The launch's CTAs make them together: each has parts of 16 ranks and kPartDepth of the depth for
// one run of rows. They hand them over as words of 64 bits, a float and the number of the round, so
// whoever needs a low asks for its word until it has the round: no fence, no counter. Words lie in
// memory that nothing else writes (batch_row_exchange.h).
#pragma once

#include "ops/cuda/cta_pair.cuh"
#include "ops/linear/cuda/batch_rows.h"
#include "ops/linear/cuda/few_row_changes.cuh"

namespace heddle::ops::cuda::batch_row {

using few_row::RunOfChange;

constexpr int kMostRuns = 64, kChangers = 8;  ///< Runs of rows with one set; warps of a CTA.
constexpr int kRunRows = kMostSlotRows, kRanks = kFewRowColumns;  ///< Rows and ranks of a part.
constexpr int kStepDepth = kChangers * kFewRowDepth;  ///< Depth of a product of all warps.
/// Steps of a part. With wide tiles CTAs would have a part more of 32 sets if there were 4; with
/// others 5 are slower.
constexpr int steps_of_part(int groups) { return groups > 2 ? 5 : 4; }
constexpr int kMostSets = 64;  ///< Sets whose slots a warp looks up at once.

/// How the lows of a launch are cut and where they meet.
struct alignas(64) LowParts {
  const SlotRun* table;                       ///< Null: one set, whose factors the sums have.
  const SlotFactors* slots[kMostFewRowSums];  ///< Changes' that have lows.
  int first_low[kMostFewRowSums], low_count, low_blocks, depth, sets;  ///< See few_row::Arguments.
  int runs;    ///< Runs of rows; kMostRuns / 8 of 8 rows if there is no table.
  int depths;  ///< Parts of the depth.
  int count;   ///< Parts of all lows.
  int tiles;   ///< CTAs that have tiles; the others make lows alone.
  int makers;  ///< CTAs that make them, which the device holds all at once.
  const void* x;
  int64_t x_stride;
  FewRowNorm norm;
  u64* words;    ///< [tiles of 16 ranks, depths, kMostBatchRows, kRanks]
  u32* counter;  ///< [2]: rounds that are over; CTAs that are through with this one.
};

/// Shared by the warps that make a part.
template <int kSteps>
struct LowSums {
  alignas(16) float norm[kSteps * kStepDepth];  ///< Its scale.
  float sums[kChangers][kRunRows][kRanks];
};

#if defined(__CUDA_ARCH_FEAT_SM90_ALL)

__device__ __forceinline__ u32 load_relaxed(const u32* address) {
  u32 v;
  asm volatile("ld.relaxed.gpu.global.u32 %0, [%1];" : "=r"(v) : "l"(address) : "memory");
  return v;
}

__device__ __forceinline__ void store_word(u64* to, float value, u32 round) {
  const u64 word = static_cast<u64>(round) << 32 | __float_as_uint(value);
  asm volatile("st.relaxed.gpu.global.u64 [%0], %1;" ::"l"(to), "l"(word) : "memory");
}

__device__ __forceinline__ ulonglong2 load_words(const u64* from) {
  ulonglong2 v;
  asm volatile("ld.relaxed.gpu.global.v2.u64 {%0, %1}, [%2];"
               : "=l"(v.x), "=l"(v.y)
               : "l"(from)
               : "memory");
  return v;
}

__device__ __forceinline__ bool are_of(const ulonglong2& words, u32 round) {
  return static_cast<u32>(words.x >> 32) == round && static_cast<u32>(words.y >> 32) == round;
}

__device__ __forceinline__ float value_of(u64 word) {
  return __uint_as_float(static_cast<u32>(word));
}

/// For bytes that are read once: they leave the L2 before what other launches left there.
__device__ __forceinline__ u64 read_once() {
  u64 policy;
  asm("createpolicy.fractional.L2::evict_first.b64 %0, 1.0;" : "=l"(policy));
  return policy;
}

/// Elements that nothing writes, asked for here and not later. Not kept in the first level of
/// cache, which is small beside so much shared memory and holds what registers cannot.
__device__ __forceinline__ FewRowVector load_early8(const bf16* from) {
  FewRowVector v;
  asm volatile("ld.global.nc.L1::no_allocate.L2::cache_hint.v4.u32 {%0, %1, %2, %3}, [%4], %5;"
               : "=r"(v.words[0]), "=r"(v.words[1]), "=r"(v.words[2]), "=r"(v.words[3])
               : "l"(from), "l"(read_once()));
  return v;
}

/// The parts of a launch's lows, by kChangers warps of each CTA.
template <int kSteps>
struct LowMaker {
  static constexpr int kThreads = kChangers * 32, kPartDepth = kSteps * kStepDepth;
  const few_row::Arguments& p;
  const LowParts& parts;

  /// A lane's run, and the slots of its number and 32 more, on their way from the tables.
  struct Found {
    SlotRun run;
    SlotFactors slots[2];
  };
  /// The CTA's first part.
  __device__ __forceinline__ int first_part() const {
    const int own = static_cast<int>(blockIdx.x);
    return own < parts.makers ? own : parts.count;
  }
  __device__ __forceinline__ Found look_at_part(int place) const {
    if (place >= parts.count) return {};
    int rank, run;
    return look(parts.slots[change_of_part(place, rank, run)], run);
  }
  /// By a warp before the launch before this one has ended: A of the CTA's part `turn` will be read
  /// soon.
  __device__ __forceinline__ void ask_for_part(int turn) const {
    const int place = first_part() + turn * parts.makers;
    if (place >= parts.count) return;
    const Part part = part_of(place, look_at_part(place));
    const int length = min(kPartDepth, parts.depth - part.depth),
              lane = static_cast<int>(threadIdx.x % 32);
    if (part.run.rows > 0 && lane < part.ranks && part.run.a_stride % 8 == 0)
      bring_near(part.run.a + (part.rank + lane) * part.run.a_stride + part.depth,
                 static_cast<u32>(length * 2));
  }

  /// By one thread of each CTA when all its warps have their lows.
  __device__ __forceinline__ void leave() const {
    if (atomicAdd(parts.counter + 1, 1U) + 1 != gridDim.x) return;
    parts.counter[1] = 0;
    parts.counter[0] += 1;
  }

 protected:
  /// 16 ranks of a change's lows for one run of rows, of a part of the depth.
  struct Part {
    RunOfChange run;
    int rank, ranks, depth;  ///< The first one and how many; where the depth begins.
    u64* words;              ///< [kMostBatchRows, kRanks]
  };

  /// First tile of the lows of a change: twice the sum's number; one more: its up_change.
  __device__ __forceinline__ int tile_of(int change) const {
    int i = 0;
    while (i + 1 < p.low_count && p.low_change[i] != change) ++i;
    return p.first_low[i];
  }
  __device__ __forceinline__ u64* words_of(int tile, int depth) const {
    return parts.words + (tile * parts.depths + depth) * (kMostBatchRows * kRanks);
  }

  /// By a warp. Loads of runs and slots do not wait for each other if the slots are few.
  __device__ __forceinline__ Found look(const SlotFactors* slots, int place) const {
    Found found{};
    if (parts.table == nullptr || slots == nullptr) return found;
    if (place < parts.runs) found.run = load_run(parts.table, place);
    if (parts.sets > kMostSets) return found;
#pragma unroll
    for (int i = 0; i < 2; ++i) {
      const int slot = static_cast<int>(threadIdx.x % 32) + 32 * i;
      if (slot < parts.sets) found.slots[i] = load_factors(slots, slot);
    }
    return found;
  }
  /// By a warp: run `place` of a change, as few_row::run_of() has it.
  template <class Change>
  __device__ __forceinline__ RunOfChange run_of(const Found& found, const Change& change,
                                                int which_layer, int place) const {
    if (parts.table == nullptr || parts.sets == 0 || parts.sets > kMostSets) {
      if (place >= parts.runs) return {};
      return few_row::run_of(p, change(), which_layer, place);
    }
    const int slot = max(found.run.slot, 0);
    const auto at_slot = [&](auto of) {
      const auto low = __shfl_sync(0xffffffffu, of(found.slots[0]), slot % 32),
                 high = __shfl_sync(0xffffffffu, of(found.slots[1]), slot % 32);
      return slot < 32 ? low : high;
    };
    using Address = unsigned long long;
    const auto a = at_slot([](const SlotFactors& f) { return reinterpret_cast<Address>(f.a); });
    const auto b = at_slot([](const SlotFactors& f) { return reinterpret_cast<Address>(f.b); });
    const int rank = at_slot([](const SlotFactors& f) { return f.rank; });
    const float scale = at_slot([](const SlotFactors& f) { return f.scale; });
    if (found.run.rows == 0 || found.run.slot < 0) return {};
    return {which_layer,
            found.run.first,
            found.run.rows,
            reinterpret_cast<const bf16*>(a),
            reinterpret_cast<const bf16*>(b),
            parts.depth,
            rank,
            rank,
            scale};
  }

  /// The change of a part, its first rank and its run. The parts of a run's tile lie far from each
  /// other, so that several CTAs have them.
  __device__ __forceinline__ int change_of_part(int place, int& rank, int& run) const {
    const int block = place % parts.low_blocks, tile = block / parts.runs;
    int i = 0;
    while (i + 1 < parts.low_count && tile >= parts.first_low[i + 1]) ++i;
    rank = (tile - parts.first_low[i]) * kRanks;
    run = block - tile * parts.runs;
    return i;
  }
  /// Without rows if there is nothing to do.
  __device__ __forceinline__ Part part_of(int place, const Found& found) const {
    int rank, at;
    const int number = change_of_part(place, rank, at);
    const RunOfChange run = run_of(
        found,
        [&]() -> const FewRowChange& {
          const int change = p.low_change[number];
          return change % 2 == 1 ? p.sums[change / 2].up_change : p.sums[change / 2].change;
        },
        0, at);
    if (run.rows <= 0 || rank >= run.rank) return {};
    const int depth = place / parts.low_blocks, tile = place % parts.low_blocks / parts.runs;
    return {run, rank, min(kRanks, run.rank - rank), depth * kPartDepth, words_of(tile, depth)};
  }
  __device__ __forceinline__ void fetch(const Part& part, int thread,
                                        FewRowVector (&a)[kSteps][2]) const {
    const int line = thread % 32 / 4,
              place = part.depth + thread / 32 * kFewRowDepth + thread % 4 * 8;
    const bf16* const from = part.run.a + (part.rank + line) * part.run.a_stride + place;
#pragma unroll
    for (int n = 0; n < kSteps; ++n) {
      const int at = n * kStepDepth;
      a[n][0] = {}, a[n][1] = {};
      if (place + at >= parts.depth) continue;
      if (line < part.ranks) a[n][0] = load_early8(from + at);
      if (line + 8 < part.ranks) a[n][1] = load_early8(from + 8 * part.run.a_stride + at);
    }
  }

  __device__ __forceinline__ void fetch_rows(const Part& part, int thread,
                                             FewRowVector (&x)[kSteps][1]) const {
    const int line = thread % 32 / 4,
              place = part.depth + thread / 32 * kFewRowDepth + thread % 4 * 8;
#pragma unroll
    for (int n = 0; n < kSteps; ++n) {
      const int at = place + n * kStepDepth;
      x[n][0] = {};
      if (at < parts.depth && line < part.run.rows)
        x[n][0] = load_row(parts.x, (part.run.first + line) * parts.x_stride + at);
    }
  }

  /// Four of the norm's scales of a part, on their way. If kNorms is 2 some threads have four more.
  static constexpr int kNorms = (kPartDepth / 4 + kThreads - 1) / kThreads;
  struct NormPart {
    uint4 bits;
    bool is_there;
  };
  __device__ __forceinline__ NormPart fetch_norm(const Part& part, int thread) const {
    const int at = part.depth + 4 * thread;
    NormPart found{{0, 0, 0, 0}, 4 * thread < kPartDepth && at < parts.depth};
    if (parts.norm.weight == nullptr || !found.is_there) return found;
    if (parts.norm.weight_type == Element::kBFloat16) {
      const uint2 v =
          __ldg(reinterpret_cast<const uint2*>(static_cast<const bf16*>(parts.norm.weight) + at));
      found.bits.x = v.x, found.bits.y = v.y;
    } else {
      found.bits =
          __ldg(reinterpret_cast<const uint4*>(static_cast<const float*>(parts.norm.weight) + at));
    }
    return found;
  }

 public:
  __device__ __forceinline__ bool makes_alone() const {
    return static_cast<int>(blockIdx.x) >= parts.tiles;
  }

  /// A CTA's first part, and its A and norm on their way.
  struct FirstPart {
    Part part;
    FewRowVector a[kSteps][2];
    NormPart norm[kNorms];
  };
  __device__ __forceinline__ void fetch_first(int thread, FirstPart& first) const {
    const int at = first_part();
    first.part = at < parts.count ? part_of(at, look_at_part(at)) : Part{};
    fetch(first.part, thread, first.a);
    for (int i = 0; i < kNorms; ++i) first.norm[i] = fetch_norm(first.part, thread + i * kThreads);
    if (!makes_alone()) asm volatile("bar.arrive 6, %0;" ::"n"(kThreads + 32) : "memory");
  }

 protected:
  /// To shared memory, zeros beyond the depth.
  __device__ __forceinline__ void put_norm(const NormPart& found, int thread,
                                           LowSums<kSteps>& shared) const {
    if (parts.norm.weight == nullptr || 4 * thread >= kPartDepth) return;
    const uint4& bits = found.bits;
    float4 v = {0, 0, 0, 0};
    if (found.is_there) {
      if (parts.norm.weight_type == Element::kBFloat16)
        v = {bf16_lo(bits.x), bf16_hi(bits.x), bf16_lo(bits.y), bf16_hi(bits.y)};
      else
        v = {__uint_as_float(bits.x), __uint_as_float(bits.y), __uint_as_float(bits.z),
             __uint_as_float(bits.w)};
      const float offset = parts.norm.offset;
      v.x += offset, v.y += offset, v.z += offset, v.w += offset;
    }
    *reinterpret_cast<float4*>(shared.norm + 4 * thread) = v;
  }

  /// x times A, its factor included, to words.
  __device__ __forceinline__ void make_part(const Part& part, int thread,
                                            const FewRowVector (&a)[kSteps][2],
                                            FewRowVector (&x)[kSteps][1], LowSums<kSteps>& shared,
                                            u32 round) const {
    float total[1][4] = {};
#pragma unroll
    for (int n = 0; n < kSteps; ++n) {
      if (parts.norm.weight != nullptr) {
        const float4* const scale = reinterpret_cast<const float4*>(
            shared.norm + thread / 32 * kFewRowDepth + thread % 4 * 8 + n * kStepDepth);
        const float4 low = scale[0], high = scale[1];
        float v[8];
        unpack(x[n][0], v);
        v[0] *= low.x, v[1] *= low.y, v[2] *= low.z, v[3] *= low.w;
        v[4] *= high.x, v[5] *= high.y, v[6] *= high.z, v[7] *= high.w;
        x[n][0] = pack<bf16>(v);
      }
      cuda::multiply(total, a[n][0], a[n][1], x[n]);
    }
    put(reinterpret_cast<float(&)[1][kRunRows][kRanks]>(shared.sums[thread / 32]), total);
    named_sync(4, kThreads);
    const int row = thread / kRanks, rank = thread % kRanks;
    if (row < part.run.rows) {
      float y = 0;
#pragma unroll
      for (int w = 0; w < kChangers; ++w) y += shared.sums[w][row][rank];
      store_word(part.words + (part.run.first + row) * kRanks + rank, y * part.run.scale, round);
    }
    named_sync(4, kThreads);
  }
};

#endif

}  // namespace heddle::ops::cuda::batch_row
