// Low-rank changes of the products of a batch's rows (batch_rows.cu says how the launch goes).
//
// The launch's CTAs make the lows together: each has parts of 16 ranks and kPartDepth of the depth
// for one run of rows. They hand them over as words of 64 bits, a float and the number of the
// round, so whoever needs a low asks for its word until it has the round: no fence, no counter.
// Words lie in memory that nothing else writes (batch_row_exchange.h).
//
// A CTA multiplies the lows of its rows by B, which bulk copies bring to slots of shared memory
// before the lows are there. Registers would be too few: what they cannot hold goes to the L2, as
// the first level of cache has less than 30 KB beside so much shared memory.
#pragma once

#include "ops/cuda/cta_pair.cuh"
#include "ops/linear/cuda/few_row_changes.cuh"

namespace heddle::ops::cuda::batch_row {

using few_row::RunOfChange;

constexpr int kMostRuns = 64, kChangers = 8;  ///< Runs of rows with one set; warps of a CTA.
constexpr int kRunRows = kMostSlotRows, kRanks = kFewRowColumns;  ///< Rows and ranks of a part.
constexpr int kPartDepth = 1024;

/// How the lows of a launch are cut and where they meet.
struct LowParts {
  int runs;      ///< Of rows; kMostRuns / 8 of 8 rows if there is no table.
  int depths;    ///< Parts of the depth.
  int count;     ///< Parts of all lows.
  int makers;    ///< CTAs that make them, which the device holds all at once.
  u64* words;    ///< [tiles of 16 ranks, depths, kMostBatchRows, kRanks]
  u32* counter;  ///< [2]: rounds that are over; CTAs that are through with this one.
};

constexpr int kSlotBytes = 2048;  ///< Of B, for a warp.
constexpr int kMostSlices = 4;    ///< Slices of 16 ranks that a warp asks for at a time.

/// A run with a change that has rows in the CTA's part.
struct ChangeJob {
  const bf16* b;
  int b_stride, tile, rank;
  short which, first, rows;
  short width;  ///< Columns of which B fits a slot; 0: B is read from where it is.
};

/// Columns of a job that a warp multiplies at a time: those of a slot and all ranks; without a slot
/// those of a piece of work and 16 ranks.
struct ChangeUnit {
  int job, column, rank;

  __device__ __forceinline__ bool operator!=(const ChangeUnit& other) const {
    return job != other.job || column != other.column;
  }
};

/// The units of a warp from `next` on, of which those before `ahead` have been asked for.
struct ChangeShare {
  ChangeUnit next, ahead, end;
};

/// A slice of 16 ranks of a job's lows.
struct LowSlice {
  int tile;
  short first, rows;
};

/// What the changing warps share. kUnits: slots of B that a warp has.
template <int kUnits>
struct ChangeShared {
  alignas(128) unsigned char b[kChangers][kUnits][kSlotBytes];
  union {
    struct {
      alignas(16) float norm[kPartDepth];  ///< Its scale.
      float sums[kChangers][kRunRows][kRanks];
    };
    alignas(16) bf16 lows[kChangers][kMostSlices][kRunRows][kRanks];
  };
  u64 landed[kChangers][kUnits];  ///< Barriers.
  ChangeJob jobs[2 * kMostRuns];  ///< Their order does not matter.
  LowSlice slices[kChangers][kMostSlices];
  ChangeShare shares[kChangers];
  int count, most_rows;

  __device__ __forceinline__ void begin() {
    count = most_rows = 0;
    for (int i = 0; i < kChangers * kUnits; ++i) mbar_init(smem_u32(&landed[0][0] + i), 1);
  }
};

template <int kPitch, int kUnits>
struct ChangedTile;

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

/// Elements that nothing writes, asked for here and not later. Not kept in the first level of
/// cache, which is small beside so much shared memory and holds what registers cannot.
__device__ __forceinline__ FewRowVector load_early8(const bf16* from) {
  FewRowVector v;
  asm volatile("ld.global.nc.L1::no_allocate.v4.u32 {%0, %1, %2, %3}, [%4];"
               : "=r"(v.words[0]), "=r"(v.words[1]), "=r"(v.words[2]), "=r"(v.words[3])
               : "l"(from));
  return v;
}

/// Consecutive bytes, a multiple of 16, to shared memory.
__device__ __forceinline__ void bulk_copy(u32 to, const void* from, u32 bytes, u32 barrier) {
  asm volatile(
      "cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes [%0], [%1], %2, [%3];" ::
          "r"(to),
      "l"(from), "r"(bytes), "r"(barrier)
      : "memory");
}

/// The columns [first, first + columns) of a sum (gated: of both its layers) for the rows
/// [row_base, row_base + rows). kPitch: floats of a row of the changes.
template <int kPitch, int kUnits>
struct ChangedTile {
  using Shared = ChangeShared<kUnits>;
  static constexpr int kThreads = kChangers * 32;
  static constexpr int kSpan = kPitch > 192 ? 48 : 64;  ///< Columns of a warp's piece of work.
  static constexpr int kListers = 128;                  ///< Threads that list the jobs.
  const few_row::Arguments& p;
  const LowParts& parts;
  const FewRowSum& sum;
  int which, first, columns, row_base, rows;

  /// What tables say of a lane's run, and of the slots of its number and 32 more, on its way.
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
    return look(change_of_part(place, rank, run), run);
  }
  /// By kListers threads: job `thread` of the tile.
  __device__ __forceinline__ Found look_at_job(int thread) const {
    return look(change_of_job(thread), thread % kMostRuns);
  }

  /// By kListers threads before the launch before this one has ended: the jobs of the tile.
  __device__ __forceinline__ void list(int thread, const Found& found, Shared& shared) const {
    static_assert(kListers == 2 * kMostRuns);
    const int layer = thread / kMostRuns;
    if (layer == 0 || sum.up != nullptr) {
      const RunOfChange run = run_of(found, change_of_job(thread), layer, thread % kMostRuns);
      if (run.rows > 0 && run.rank > 0 && run.first < row_base + rows &&
          run.first + run.rows > row_base) {
        const bool is_whole = run.b_stride == run.rank && run.rank % 8 == 0 && run.rank <= 64;
        const int width = kSlotBytes / 2 / ((run.rank + 15) / 16 * 16) / 16 * 16;
        shared.jobs[atomicAdd(&shared.count, 1)] = {
            run.b,
            static_cast<int>(run.b_stride),
            tile_of(2 * which + layer),
            run.rank,
            static_cast<short>(layer),
            static_cast<short>(run.first),
            static_cast<short>(run.rows),
            static_cast<short>(is_whole ? min(width, kSpan) : 0)};
        atomicMax(&shared.most_rows, run.rows);
        const int valid = min(columns, sum.columns - first);
        if (is_whole && valid > 0)
          bring_near(run.b + first * run.b_stride, static_cast<u32>(valid * run.rank * 2));
      }
    }
    asm volatile("bar.arrive 5, %0;" ::"n"(kListers + kThreads) : "memory");
  }

  /// Changes [rows, kPitch] by kChangers warps, zeros where there is none; of a gated sum those of
  /// the second layer follow the first one's columns. They lack the norm's factor of the row.
  /// `found`: of the CTA's first part.
  __device__ __forceinline__ void make(int thread, const Found& found, Shared& shared,
                                       float* changes) const {
    int at = first_part();
    u32 round;
    {
      const Part part = at < parts.count ? part_of(at, found) : Part{};
      FewRowVector a[kAhead][2], x[kAhead][1];
      fetch(part, thread, a);
      bring_norm(part, thread, shared);
      for (int i = thread; i < rows * kPitch / 4; i += kThreads)
        reinterpret_cast<float4*>(changes)[i] = {0, 0, 0, 0};
      named_sync(5, kListers + kThreads);
      begin(thread / 32, shared);
      wait_for_previous();
      fetch_rows(part, thread, x);
      round = load_relaxed(parts.counter) + 1;
      if (part.run.rows > 0) make_part(part, thread, a, x, shared, round);
    }
    for (at += parts.makers; at < parts.count; at += parts.makers) {
      const Part part = part_of(at, look_at_part(at));
      if (part.run.rows <= 0) continue;
      FewRowVector a[kAhead][2], x[kAhead][1];
      fetch(part, thread, a);
      fetch_rows(part, thread, x);
      bring_norm(part, thread, shared);
      named_sync(4, kThreads);
      make_part(part, thread, a, x, shared, round);
    }
    multiply(thread / 32, shared, round, changes);
  }

  /// By a warp before the launch before this one has ended: A of the CTA's part `turn` will be read
  /// soon.
  __device__ __forceinline__ void ask_for_part(int turn) const {
    const int place = first_part() + turn * parts.makers;
    if (place >= parts.count) return;
    const Part part = part_of(place, look_at_part(place));
    const int length = min(kPartDepth, p.depth - part.depth),
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

 private:
  static constexpr int kAhead = kPartDepth / (kChangers * kFewRowDepth);

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

  __device__ __forceinline__ const FewRowChange& change_of_job(int thread) const {
    return thread < kMostRuns ? sum.change : sum.up_change;
  }

  /// By a warp. Loads of runs and slots do not wait for each other if the slots are few.
  __device__ __forceinline__ Found look(const FewRowChange& change, int place) const {
    Found found{};
    if (p.slots.runs == nullptr || change.slots == nullptr) return found;
    if (place < parts.runs) found.run = load_run(p.slots.runs, place);
    if (p.slots.sets > 64) return found;
#pragma unroll
    for (int i = 0; i < 2; ++i) {
      const int slot = static_cast<int>(threadIdx.x % 32) + 32 * i;
      if (slot < p.slots.sets) found.slots[i] = load_factors(change.slots, slot);
    }
    return found;
  }
  /// By a warp: run `place` of a change, as few_row::run_of() has it.
  __device__ __forceinline__ RunOfChange run_of(const Found& found, const FewRowChange& change,
                                                int which_layer, int place) const {
    if (p.slots.runs == nullptr || change.slots == nullptr || p.slots.sets == 0 ||
        p.slots.sets > 64) {
      if (place >= parts.runs) return {};
      return few_row::run_of(p, change, which_layer, place);
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
            p.depth,
            rank,
            rank,
            scale};
  }

  /// The change of a part, its first rank and its run. The parts of a run's tile lie far from each
  /// other, so that several CTAs have them.
  __device__ __forceinline__ const FewRowChange& change_of_part(int place, int& rank,
                                                                int& run) const {
    const int block = place % p.low_blocks, tile = block / parts.runs;
    int i = 0;
    while (i + 1 < p.low_count && tile >= p.first_low[i + 1]) ++i;
    rank = (tile - p.first_low[i]) * kRanks;
    run = block - tile * parts.runs;
    const FewRowSum& of = p.sums[p.low_change[i] / 2];
    return p.low_change[i] % 2 == 1 ? of.up_change : of.change;
  }
  /// Without rows if there is nothing to do.
  __device__ __forceinline__ Part part_of(int place, const Found& found) const {
    int rank, at;
    const FewRowChange& change = change_of_part(place, rank, at);
    const RunOfChange run = run_of(found, change, 0, at);
    if (run.rows <= 0 || rank >= run.rank) return {};
    const int depth = place / p.low_blocks, tile = place % p.low_blocks / parts.runs;
    return {run, rank, min(kRanks, run.rank - rank), depth * kPartDepth, words_of(tile, depth)};
  }
  __device__ __forceinline__ void fetch(const Part& part, int thread,
                                        FewRowVector (&a)[kAhead][2]) const {
    const int line = thread % 32 / 4,
              place = part.depth + thread / 32 * kFewRowDepth + thread % 4 * 8;
    const bf16* const from = part.run.a + (part.rank + line) * part.run.a_stride + place;
#pragma unroll
    for (int n = 0; n < kAhead; ++n) {
      const int at = n * kChangers * kFewRowDepth;
      a[n][0] = {}, a[n][1] = {};
      if (place + at >= p.depth) continue;
      if (line < part.ranks) a[n][0] = load_early8(from + at);
      if (line + 8 < part.ranks) a[n][1] = load_early8(from + 8 * part.run.a_stride + at);
    }
  }

  __device__ __forceinline__ void fetch_rows(const Part& part, int thread,
                                             FewRowVector (&x)[kAhead][1]) const {
    const int line = thread % 32 / 4,
              place = part.depth + thread / 32 * kFewRowDepth + thread % 4 * 8;
#pragma unroll
    for (int n = 0; n < kAhead; ++n) {
      const int at = place + n * kChangers * kFewRowDepth;
      x[n][0] = {};
      if (at < p.depth && line < part.run.rows)
        x[n][0] = load_row(p.x, (part.run.first + line) * p.x_stride + at);
    }
  }

  /// The norm's scales of a part to shared memory, zeros beyond the depth; a thread has four.
  __device__ __forceinline__ void bring_norm(const Part& part, int thread, Shared& shared) const {
    if (p.norm.weight == nullptr) return;
    const int at = part.depth + 4 * thread;
    float4 v = {0, 0, 0, 0};
    if (at < p.depth) {
      if (p.norm.weight_type == Element::kBFloat16) {
        const uint2 bits =
            __ldg(reinterpret_cast<const uint2*>(static_cast<const bf16*>(p.norm.weight) + at));
        v = {bf16_lo(bits.x), bf16_hi(bits.x), bf16_lo(bits.y), bf16_hi(bits.y)};
      } else {
        v = __ldg(reinterpret_cast<const float4*>(static_cast<const float*>(p.norm.weight) + at));
      }
      const float offset = p.norm.offset;
      v.x += offset, v.y += offset, v.z += offset, v.w += offset;
    }
    *reinterpret_cast<float4*>(shared.norm + 4 * thread) = v;
  }

  /// x times A, its factor included, to words.
  __device__ __forceinline__ void make_part(const Part& part, int thread,
                                            const FewRowVector (&a)[kAhead][2],
                                            FewRowVector (&x)[kAhead][1], Shared& shared,
                                            u32 round) const {
    float total[1][4] = {};
#pragma unroll
    for (int n = 0; n < kAhead; ++n) {
      if (p.norm.weight != nullptr) {
        const float4* const scale =
            reinterpret_cast<const float4*>(shared.norm + thread / 32 * kFewRowDepth +
                                            thread % 4 * 8 + n * kChangers * kFewRowDepth);
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

  /// The lows of a warp's slices, summed over the depth, as soon as they are there.
  __device__ __forceinline__ void take_lows(int warp, int slices, u32 round, Shared& shared) const {
    constexpr int kUnderWay = 4;
    const int lane = threadIdx.x % 32, tiles = shared.most_rows > 4 ? 2 : 1,
              place = lane / 8 * kRanks + lane % 8 * 2;
    const u64* const words_of_lane = parts.words + place;
    float low[2] = {};
    for (int at = 0, tile = 0, depth = 0; at < slices;) {
      ulonglong2 words[kUnderWay];
      int from[kUnderWay], to[kUnderWay];  // negative: nothing
#pragma unroll
      for (int k = 0; k < kUnderWay; ++k) {
        from[k] = to[k] = -1;
        if (at >= slices) continue;
        const LowSlice& slice = shared.slices[warp][at];
        if (tile * 4 + lane / 8 < slice.rows) {
          from[k] =
              ((slice.tile * parts.depths + depth) * kMostBatchRows + slice.first + tile * 4) *
              kRanks;
          if (depth + 1 == parts.depths) to[k] = (at * kRunRows + tile * 4) * kRanks + place;
        }
        if (++depth < parts.depths) continue;
        depth = 0;
        if (++tile < tiles) continue;
        tile = 0, ++at;
      }
      bool is_done;
      do {
        is_done = true;
#pragma unroll
        for (int k = 0; k < kUnderWay; ++k) {
          if (from[k] >= 0) words[k] = load_words(words_of_lane + from[k]);
        }
#pragma unroll
        for (int k = 0; k < kUnderWay; ++k) {
          if (from[k] >= 0 && !are_of(words[k], round)) is_done = false;
        }
      } while (!is_done);
#pragma unroll
      for (int k = 0; k < kUnderWay; ++k) {
        if (from[k] < 0) continue;
        low[0] += value_of(words[k].x), low[1] += value_of(words[k].y);
        if (to[k] < 0) continue;
        *reinterpret_cast<u32*>(&shared.lows[warp][0][0][0] + to[k]) = pack_bf16(low[0], low[1]);
        low[0] = low[1] = 0;
      }
    }
    __syncwarp();
  }

  __device__ __forceinline__ static int slices_of(const ChangeJob& job) {
    return job.width > 0 ? (job.rank + kRanks - 1) / kRanks : 1;
  }
  __device__ __forceinline__ static int end_of_span(int column) {
    return column / kSpan * kSpan + kSpan;
  }
  __device__ __forceinline__ void advance(ChangeUnit& unit, const ChangeJob& job) const {
    if (job.width == 0) {
      unit.rank += kRanks;
      if (unit.rank < job.rank) return;
      unit.rank = 0;
    }
    const int end = end_of_span(unit.column);
    unit.column = job.width > 0 ? min(unit.column + job.width, end) : end;
    if (unit.column >= columns) unit.column = 0, ++unit.job;
  }
  /// By a warp: asks for B of the next unit.
  __device__ __forceinline__ void ask(ChangeShare& share, int warp, int slot,
                                      Shared& shared) const {
    const ChangeJob job = shared.jobs[share.ahead.job];
    if (threadIdx.x % 32 == 0) {
      const u32 barrier = smem_u32(&shared.landed[warp][slot]);
      const int column = share.ahead.column,
                count = min(min(static_cast<int>(job.width), end_of_span(column) - column),
                            min(columns, sum.columns - first) - column);
      if (count > 0) {
        const u32 bytes = static_cast<u32>(count * job.rank * 2);
        mbar_expect(barrier, bytes);
        bulk_copy(smem_u32(shared.b[warp][slot]), job.b + (first + column) * job.rank, bytes,
                  barrier);
      } else {
        mbar_arrive(barrier);
      }
    }
    advance(share.ahead, job);
  }
  /// The warp's share of the work, of which it asks for what its slots hold.
  __device__ __forceinline__ void begin(int warp, Shared& shared) const {
    const int spans = (columns + kSpan - 1) / kSpan, all = shared.count * spans;
    const auto unit = [&](int i) { return ChangeUnit{i / spans, i % spans * kSpan, 0}; };
    ChangeShare share{unit(all * warp / kChangers), {}, unit(all * (warp + 1) / kChangers)};
    share.ahead = share.next;
    for (int slot = 0; slot < kUnits && share.ahead != share.end; ++slot)
      ask(share, warp, slot, shared);
    shared.shares[warp] = share;  // by all lanes
  }

  /// Lows times B. Lane 4 g + t has rows 2 t and 2 t + 1 of columns g, g + 8, ... of a unit.
  __device__ __forceinline__ void multiply(int warp, Shared& shared, u32 round,
                                           float* changes) const {
    ChangeShare share = shared.shares[warp];
    int done = 0;
    while (share.next != share.end) {
      int units = 0, slices = 0, before = -1;
      ChangeUnit last = share.next;
      for (; units < kUnits && last != share.end; ++units) {
        const ChangeJob job = shared.jobs[last.job];
        const int own = slices_of(job);
        if (last.job != before || job.width == 0) {
          if (slices + own > kMostSlices) break;
          if (threadIdx.x % 32 < own)
            shared.slices[warp][slices + threadIdx.x % 32] = {
                job.tile + last.rank / kRanks + static_cast<int>(threadIdx.x % 32), job.first,
                job.rows};
          slices += own, before = last.job;
        }
        advance(last, job);
      }
      __syncwarp();
      take_lows(warp, slices, round, shared);
      slices = 0, before = -1;
      for (int u = 0; u < units; ++u, ++done) {
        const ChangeJob job = shared.jobs[share.next.job];
        const int own = slices_of(job);
        if (share.next.job != before || job.width == 0) slices += own, before = share.next.job;
        const int slot = done % kUnits;
        mbar_wait(smem_u32(&shared.landed[warp][slot]), done / kUnits & 1);
        multiply_unit(job, share.next, reinterpret_cast<const bf16*>(shared.b[warp][slot]), own,
                      &shared.lows[warp][slices - own], changes);
        advance(share.next, job);
        __syncwarp();
        if (share.ahead != share.end) ask(share, warp, slot, shared);
      }
    }
  }

  __device__ __forceinline__ void multiply_unit(const ChangeJob& job, const ChangeUnit& unit,
                                                const bf16* slot, int slices,
                                                const bf16 (*lows)[kRunRows][kRanks],
                                                float* changes) const {
    const int lane = threadIdx.x % 32, g = lane / 4, t = lane % 4, end = end_of_span(unit.column),
              width = job.width > 0 ? min(static_cast<int>(job.width), end - unit.column) : kSpan;
#pragma unroll
    for (int j = 0; j < kSpan; j += 16) {
      if (j >= width) break;
      const int column = unit.column + j + g;
      float sums[4] = {};
      for (int i = 0; i < slices; ++i) {
        uint2 low = make_uint2(0, 0), high = low, x = low;
        const int at = i * kRanks + 4 * t;
        if (job.width == 0) {
          const int valid = min(columns, sum.columns - first) - column;
          const bf16* const from = job.b + int64_t{first + column} * job.b_stride;
          low = load_factor4(from, unit.rank + at, job.rank, valid > 0);
          high = load_factor4(from + 8 * job.b_stride, unit.rank + at, job.rank, valid > 8);
        } else if (at < job.rank) {
          low = *reinterpret_cast<const uint2*>(slot + (j + g) * job.rank + at);
          high = *reinterpret_cast<const uint2*>(slot + (j + g + 8) * job.rank + at);
        }
        if (g < job.rows) x = *reinterpret_cast<const uint2*>(&lows[i][g][4 * t]);
        const u32 columns_of[4] = {low.x, high.x, low.y, high.y};
        mma_bf16(sums, columns_of, x.x, x.y);
      }
      add_change(job, column, sums, changes);
    }
  }

  /// Adds to columns `column` and 8 more of a lane, which no other thread has.
  __device__ __forceinline__ void add_change(const ChangeJob& job, int column,
                                             const float (&sums)[4], float* changes) const {
    const int t = threadIdx.x % 4;
#pragma unroll
    for (int r = 0; r < 2; ++r) {
      const int row = job.first + 2 * t + r - row_base;
      if (2 * t + r >= job.rows || row < 0 || row >= rows) continue;
      float* const to = changes + row * kPitch + job.which * columns + column;
      if (column < columns) to[0] += sums[r];
      if (column + 8 < columns) to[8] += sums[r + 2];
    }
  }
};

#endif

}  // namespace heddle::ops::cuda::batch_row
