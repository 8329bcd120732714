// Low-rank changes of the products of a batch's rows (batch_rows.cu says how the launch goes): the
// warps that multiply the rows by A as they pass, and the products of these lows by B.
//
// A CTA's part of a low is the sum over its blocks of the depth, rounded; its part of the change,
// that times B, goes on from its sums of the wide product, before the parts of a cluster's CTAs are
// added. So a row's bits are the same whether all rows share a set, where each cluster makes the
// lows of its columns by itself and the multiplying warps go on with them, or rows have several:
// then each cluster makes some of the lows, and all read those of their part of the rows in memory
// on the way out. The norm's factor of a row multiplies the sum and its change at the end.
#pragma once

#include "ops/linear/cuda/batch_row_parts.cuh"

namespace heddle::ops::cuda::batch_row {

#if defined(__CUDA_ARCH_FEAT_SM90_ALL)

using few_row::LowItem;
using few_row::RunOfChange;

/// Runs that a table may have.
__device__ __forceinline__ int runs_of(const few_row::Arguments& p) {
  return p.slots.runs != nullptr ? p.slots.count : kMostBatchRows / kMostSlotRows;
}

/// Item `t` of those that the CTA's cluster makes. Without rows: there is none.
__device__ __forceinline__ LowItem item_of(const Work& work, int t) {
  const int cluster = static_cast<int>(blockIdx.x) / work.p.split,
            i = cluster + t * work.few.makers;
  if (cluster >= work.few.makers || i >= work.few.low_blocks) return {};
  return few_row::low_item(work.few, runs_of(work.few), i);
}

/// Copies of a lane's part of a tile of A: 16 bytes of every fourth row, or with two warps of every
/// eighth, of each block. Copies are asynchronous; the ring's barriers do not count them.
template <int kRows, int kGroups, Changes kChanges, int kWarpsOfTile>
struct FactorCopies {
  using R = Ring<kRows, kGroups, kChanges>;
  static constexpr int kOwn = kLowColumns / 4 / kWarpsOfTile;
  const bf16* from = nullptr;  ///< The lane's first row, at the CTA's depth; null: no tile.
  int64_t stride = 0;
  int rows = 0, first = 0;  ///< Rows of the tile; the lane's first one.

  /// Rows of `run`'s A from `low` on.
  __device__ __forceinline__ void find(const Work& work, const RunOfChange& run, int low, int warp) {
    const int lane = threadIdx.x % 32;
    rows = min(kLowColumns, run.rank - low);
    first = lane / 8 + (kWarpsOfTile > 1 ? warp * kOwn * 4 : 0);
    stride = run.a_stride;
    if (rows > 0) from = run.a + (low + first) * stride + work.begin * kDepth + lane % 8 * 8;
  }
  __device__ __forceinline__ void copy(const Work& work, const R& ring, int i, int tile) const {
    if (from == nullptr || i >= work.steps) return;
    const int place = threadIdx.x % 8 * 8;
    const bool is_there = place < work.valid(i);
#pragma unroll
    for (int j = 0; j < kOwn; ++j) {
      const int row = first + j * 4;
      cp_async16(tile_address(ring.factor(i, tile), kLowColumns, row, place),
                 from + j * 4 * stride + i * kDepth, is_there && row < rows);
    }
  }
  /// Brings what the first blocks leave near.
  __device__ __forceinline__ void bring_rest_near(const Work& work) const {
    constexpr int kEarly = R::L::kFactorStages;
    if (from == nullptr || threadIdx.x % 8 != 0 || work.steps <= kEarly) return;
    const int rest = min((work.steps - kEarly) * kDepth,
                         work.few.depth - (work.begin + kEarly) * kDepth);
#pragma unroll
    for (int j = 0; j < kOwn; ++j) {
      if (first + j * 4 < rows)
        bring_near(from + j * 4 * stride + kEarly * kDepth, static_cast<u32>(rest * 2));
    }
  }
};

/// By a warp: which rows have which B.
template <int kRows, int kColumns>
__device__ __forceinline__ void fill_table(const Work& work, ChangeTable& table) {
  const int lane = threadIdx.x % 32, runs = runs_of(work.few), layers = work.is_gated() ? 2 : 1,
            columns = kColumns / layers, per = kRows / work.p.split, row_base = work.rank * per,
            valid = min(columns, work.sum.columns - work.first);
  for (int i = lane; i < kMostBatchRows; i += 32) {
    table.of_row[i] = ChangeTable::kNoRun;
    table.after[i] = static_cast<unsigned char>(i + 1);
  }
  __syncwarp();
  for (int i = lane; i < runs * layers; i += 32) {
    const int layer = i / runs, place = i % runs;
    const RunOfChange run = few_row::run_of(work.few, work.change(layer), layer, place);
    const bool is_there = run.rows > 0 && run.rank > 0;
    table.runs[layer][place] = {run.b, static_cast<int>(run.b_stride), is_there ? run.rank : 0,
                                run.scale};
    if (!is_there) continue;
    for (int r = 0; r < run.rows; ++r) {
      table.of_row[run.first + r] = static_cast<unsigned char>(place);
      table.after[run.first + r] = static_cast<unsigned char>(run.first + run.rows);
    }
    if (run.first < row_base + per && run.first + run.rows > row_base && valid > 0 &&
        run.b_stride == run.rank && run.rank % 8 == 0)
      bring_near(run.b + work.first * run.b_stride, static_cast<u32>(valid * run.rank * 2));
  }
}

/// Adds the products of a block: 16 rows of a tile of A, 8 rows a tile of the input, from
/// `first_row` on. Two tiles of the input come by one load, a single one with two steps of 16.
template <int kTiles, int kRows>
__device__ __forceinline__ void add_block(float (&total)[kTiles][4], u32 a, u32 rows,
                                          int first_row) {
  const int lane = threadIdx.x % 32, line = lane % 8, part = lane / 8;
#pragma unroll
  for (int k = 0; k < kDepth; k += 16) {
    u32 columns[4];
    ldmatrix4(columns, tile_address(a, kLowColumns, line + part % 2 * 8, k + part / 2 * 8));
    u32 x[kTiles][2];
    if constexpr (kTiles == 1) {
      const u32 at = tile_address(rows, kRows, min(first_row + line, kRows - 1), k + part % 2 * 8);
      asm volatile("ldmatrix.sync.aligned.m8n8.x2.shared.b16 {%0, %1}, [%2];"
                   : "=r"(x[0][0]), "=r"(x[0][1])
                   : "r"(at)
                   : "memory");
    } else {
#pragma unroll
      for (int r = 0; r < kTiles; r += 2) {
        u32 two[4];
        ldmatrix4(two, tile_address(rows, kRows, first_row + (r + part / 2) * 8 + line,
                                    k + part % 2 * 8));
        x[r][0] = two[0], x[r][1] = two[1], x[r + 1][0] = two[2], x[r + 1][1] = two[3];
      }
    }
#pragma unroll
    for (int r = 0; r < kTiles; ++r) mma_bf16(total[r], columns, x[r][0], x[r][1]);
  }
}

/// All blocks of an item, from memory, in the order of add_block().
__device__ __forceinline__ void add_from_memory(const Work& work, const LowItem& item,
                                                float (&total)[4]) {
  const few_row::Arguments& few = work.few;
  const RunOfChange& run = item.run;
  const int lane = threadIdx.x % 32, line = lane / 4, row = item.first + line;
  const auto pair = [](const bf16* from, bool is_there) {
    return is_there ? __ldcg(reinterpret_cast<const u32*>(from)) : 0u;
  };
#pragma unroll 2
  for (int i = 0; i < work.steps * (kDepth / 16); ++i) {
    u32 columns[4], x[2];
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      const int column = work.begin * kDepth + i * 16 + half * 8 + lane % 4 * 2;
      const bool is_there = column < few.depth;
      columns[2 * half] =
          pair(run.a + row * run.a_stride + column, is_there && row < run.rank);
      columns[2 * half + 1] =
          pair(run.a + (row + 8) * run.a_stride + column, is_there && row + 8 < run.rank);
      x[half] = pair(static_cast<const bf16*>(few.x) + (run.first + line) * few.x_stride + column,
                     is_there && line < run.rows);
      if (!work.is_normed() || !is_there) continue;
      float weight[2];
#pragma unroll
      for (int e = 0; e < 2; ++e)
        weight[e] = few.norm.offset + read_one(few.norm.weight, few.norm.weight_type, column + e);
      x[half] = pack_bf16(bf16_lo(x[half]) * weight[0], bf16_hi(x[half]) * weight[1]);
    }
    mma_bf16(total, columns, x[0], x[1]);
  }
}

/// Where a lane puts the CTA's part of an item: rows 2 t and 2 t + 1 of columns g and g + 8.
struct PartPlace {
  bf16* to = nullptr;
  int stride = 0, rows = 0;  ///< Rows of the lane.
  float scale = 0;

  __device__ __forceinline__ void find(const Work& work, const LowItem& item) {
    const int lane = threadIdx.x % 32, row = lane % 4 * 2;
    stride = static_cast<int>(item.change->low_stride);
    rows = item.run.rows - row;
    scale = item.run.scale;
    to = static_cast<bf16*>(item.change->low) +
         static_cast<int64_t>(work.rank * work.few.rows + item.run.first + row) * stride +
         item.first + lane / 4;
  }
  __device__ __forceinline__ void put(const float (&total)[4]) const {
#pragma unroll
    for (int r = 0; r < 2; ++r) {
      if (r >= rows) continue;
      to[r * stride] = __float2bfloat16_rn(total[r] * scale);
      to[r * stride + 8] = __float2bfloat16_rn(total[2 + r] * scale);
    }
  }
};

/// The lows of the set that all rows share: a warp has half of the rows, or of a gated sum a layer.
template <int kRows, int kGroups, Changes kChanges>
__device__ __forceinline__ void make_lows_of_one_set(const Work& work,
                                                     const Ring<kRows, kGroups, kChanges>& ring,
                                                     int warp, bf16* tiles) {
  using L = Layout<kRows, kGroups, kChanges>;
  constexpr bool kIsGated = L::kIsGated;
  constexpr int kOwn = kRows / (kIsGated ? 8 : 16);
  const int lane = threadIdx.x % 32, layer = kIsGated ? warp : 0,
            first_row = kIsGated ? 0 : warp * kRows / 2;
  // Of a gated sum each warp has a tile of its own, otherwise both share one.
  FactorCopies<kRows, kGroups, kChanges, kIsGated ? 1 : kLowWarps> copies;
  const RunOfChange set = few_row::only_set(work.few, work.change(layer));
  const few_row::RowMask rows = few_row::rows_of_sets(work.few);
  copies.find(work, set, 0, warp);
  for (int i = 0; i < L::kFactorStages - 1; ++i) {
    copies.copy(work, ring, i, layer);
    cp_async_commit();
  }
  copies.bring_rest_near(work);
  wait_for_previous();
  float total[kOwn][4] = {};
  for (int i = 0; i < work.steps; ++i) {
    cp_async_wait<L::kFactorStages - 2>();  // the tile is there, and nobody reads the one before
    kIsGated ? __syncwarp() : named_sync(5, kLowWarps * 32);
    copies.copy(work, ring, i + L::kFactorStages - 1, layer);
    cp_async_commit();
    mbar_wait(ring.full(i), ring.phase(i));
    if (work.is_normed()) mbar_wait(ring.scaled(i), ring.phase(i));
    if (set.rank > 0)
      add_block<kOwn, kRows>(total, ring.factor(i, layer), ring.rows(i), first_row);
    pin(total);  // the products have read the stage
    __syncwarp();
    if (lane == 0) mbar_arrive(ring.empty(i));
  }
  if (!kIsGated) named_sync(5, kLowWarps * 32);  // nobody reads the tiles of A any more
#pragma unroll
  for (int r = 0; r < kOwn; ++r) {
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      const int row = first_row + r * 8 + lane % 4 * 2 + i % 2, column = lane / 4 + i / 2 * 8;
      tiles[layer * (kLowBytes / 2) + row * kLowColumns + column] =
          __float2bfloat16_rn(rows.has(row) ? total[r][i] * set.scale : 0.f);
    }
  }
  named_arrive(1, L::kMeeting);
}

/// An item that no stage has a tile for: out of the way, as code has to come from memory too.
__device__ __noinline__ void make_low_from_memory(const Arguments& p, int begin, int steps,
                                                  int rank, int t) {
  const Work work{p, p.few, p.few.sums[0], 0, 0, begin, steps, rank};
  const LowItem item = item_of(work, t);
  if (item.run.rows <= 0) return;
  float total[4] = {};
  add_from_memory(work, item, total);
  PartPlace place;
  place.find(work, item);
  place.put(total);
}

/// The lows of the cluster's items.
template <int kRows, int kGroups, Changes kChanges>
__device__ __forceinline__ void make_lows_of_runs(const Work& work,
                                                  const Ring<kRows, kGroups, kChanges>& ring,
                                                  int warp) {
  using L = Layout<kRows, kGroups, kChanges>;
  constexpr int kOwn = L::kTiles / kLowWarps;
  const int lane = threadIdx.x % 32;
  FactorCopies<kRows, kGroups, kChanges, 1> copies[kOwn];
  PartPlace places[kOwn];
  int first_row[kOwn];
#pragma unroll
  for (int n = 0; n < kOwn; ++n) {
    const LowItem item = item_of(work, warp + n * kLowWarps);
    first_row[n] = item.run.rows > 0 ? item.run.first : -1;
    if (item.run.rows <= 0) continue;
    copies[n].find(work, item.run, item.first, warp);
    places[n].find(work, item);
  }
  const auto copy = [&](int i) {
#pragma unroll
    for (int n = 0; n < kOwn; ++n) copies[n].copy(work, ring, i, warp + n * kLowWarps);
    cp_async_commit();
  };
  for (int i = 0; i < L::kFactorStages - 1; ++i) copy(i);
#pragma unroll
  for (int n = 0; n < kOwn; ++n) copies[n].bring_rest_near(work);
  wait_for_previous();
  float total[kOwn][1][4] = {};
  for (int i = 0; i < work.steps; ++i) {
    cp_async_wait<L::kFactorStages - 2>();  // the tiles are there, and no lane reads those before
    __syncwarp();
    copy(i + L::kFactorStages - 1);
    mbar_wait(ring.full(i), ring.phase(i));
    if (work.is_normed()) mbar_wait(ring.scaled(i), ring.phase(i));
#pragma unroll
    for (int n = 0; n < kOwn; ++n) {
      if (first_row[n] >= 0)
        add_block<1, kRows>(total[n], ring.factor(i, warp + n * kLowWarps), ring.rows(i),
                            first_row[n]);
      pin(total[n]);  // the products have read the stage
    }
    __syncwarp();
    if (lane == 0) mbar_arrive(ring.empty(i));
  }
  named_arrive(1, L::kMeeting);
#pragma unroll
  for (int n = 0; n < kOwn; ++n) {
    if (first_row[n] >= 0) places[n].put(total[n][0]);
  }
  // The items of a cluster that are more than a stage has tiles.
  const int cluster = static_cast<int>(blockIdx.x) / work.p.split;
  u32 count = 0;
  for (int t = warp;
       cluster < work.few.makers && cluster + t * work.few.makers < work.few.low_blocks;
       t += kLowWarps) {
    ++count;
    if (t >= L::kTiles) make_low_from_memory(work.p, work.begin, work.steps, work.rank, t);
  }
  __syncwarp();
  if (lane == 0 && count > 0) few_row::announce_lows(work.few, count);
}

/// By a warp of each CTA, until all lows of runs are there.
__device__ __forceinline__ void wait_for_lows_of_runs(const Work& work) {
  few_row::wait_for_lows(work.few, static_cast<u32>(work.few.low_blocks * work.p.split));
  if (threadIdx.x % 32 == 0) few_row::leave_lows(work.few, gridDim.x);
}

/// A row's low as CTA s of the clusters made it.
__device__ __forceinline__ const bf16* part_of_low(const Work& work, int layer, int row, int s) {
  const FewRowChange& change = work.change(layer);
  return static_cast<const bf16*>(change.low) + (s * work.few.rows + row) * change.low_stride;
}
__device__ __forceinline__ uint2 load_low(const bf16* low, int at, bool is_there) {
  return is_there ? __ldcg(reinterpret_cast<const uint2*>(low + at)) : make_uint2(0, 0);
}

/// Whether a change is one product, whose factor is read 4 elements at a time.
__device__ __forceinline__ bool is_simple(const ChangeTable::Run& run) {
  return run.rank <= kLowColumns && run.rank % 4 == 0;
}

/// Sums of a lane of a Piece, and the squares of its row of the lows.
struct PieceSums {
  float totals[2][4], square;
};

/// 8 rows of 16 columns on their way out, by a warp, as mma.m16n8k16 makes their change. A lane has
/// rows 2 t and 2 t + 1 of two columns; its numbers are [layer][2 column + row].
template <int kRows, int kGroups, Changes kChanges>
struct Piece {
  using L = Layout<kRows, kGroups, kChanges>;
  static constexpr bool kIsGated = L::kIsGated;
  /// Halves are layers of a gated sum. Registers are few.
  static constexpr int kHalves = kIsGated ? 2 : 1, kRunsAtOnce = kIsGated ? 2 : 4,
                       kLows = kIsGated ? kLayers : 1,
                       kLaneColumns = 2, kColumns = 8 * kLaneColumns,
                       kSpans = (kIsGated ? L::kColumns / 2 : L::kColumns) / kColumns;
  /// CTAs whose numbers are asked for at once.
  static constexpr int kPartsAtOnce = kGroups > 1 ? 2 : 4;
  int row, own;  ///< The first row; the lane's first column of the tile.
  int run[kRunsAtOnce], next;
  bool is_deep;  ///< Some of these runs are not simple.
  uint2 b[kHalves][kRunsAtOnce][2];

  static __device__ __forceinline__ int count(const Work& work) {
    return (kRows / work.p.split + 7) / 8 * kSpans;
  }
  /// False if nothing of it is there.
  __device__ __forceinline__ bool place(const Work& work, int i) {
    row = work.rank * (kRows / work.p.split) + i / kSpans * 8;
    const int span = i % kSpans * kColumns;
    own = span + threadIdx.x % 32 / 4 * kLaneColumns;
    return row < work.few.rows && work.first + span < work.sum.columns;
  }
  static __device__ __forceinline__ int layer(int half) { return kIsGated ? half : 0; }

  /// The factors of the runs from a row on; `next` is the row after these.
  __device__ __forceinline__ void fetch(const Work& work, const ChangeTable& table, int from) {
    const int end = min(row + 8, kRows), at = threadIdx.x % 4 * 4;
    next = from;
    is_deep = false;
#pragma unroll
    for (int j = 0; j < kRunsAtOnce; ++j) {
      run[j] = next < end ? table.of_row[next] : ChangeTable::kNoRun;
      next = next < end ? table.after[next] : end;
#pragma unroll
      for (int h = 0; h < kHalves; ++h) {
        const ChangeTable::Run& of = table.runs[layer(h)][min(run[j], kMostRuns - 1)];
        const int first = work.first + own;
        const bf16* const base = of.b + static_cast<int64_t>(first) * of.b_stride + at;
        const bool is_run = run[j] != ChangeTable::kNoRun,
                   is_there = is_run && at < of.rank && is_simple(of);
        is_deep = is_deep || (is_run && !is_simple(of));
#pragma unroll
        for (int c = 0; c < 2; ++c) {
          b[h][j][c] = make_uint2(0, 0);
          if (is_there && first + c < work.sum.columns)
            b[h][j][c] = *reinterpret_cast<const uint2*>(base + c * of.b_stride);
        }
      }
    }
  }
  /// Runs of the lane's row of the lows and of its rows of the outputs.
  struct Own {
    int low, output[2];
  };
  /// Adds the changes of the runs that were fetched to what a CTA has. Each run has products of its
  /// own, so that no row sees another set's numbers.
  __device__ __forceinline__ void add_runs(const Own& mine, const uint2 (&low)[kLows],
                                           float (&sums)[kHalves][4]) const {
#pragma unroll
    for (int j = 0; j < kRunsAtOnce; ++j) {
      if (run[j] == ChangeTable::kNoRun) continue;
      const bool is_mine = mine.low == run[j];
#pragma unroll
      for (int h = 0; h < kHalves; ++h) {
        const u32 columns[4] = {b[h][j][0].x, b[h][j][1].x, b[h][j][0].y, b[h][j][1].y};
        float part[4] = {sums[h][0], sums[h][1], sums[h][2], sums[h][3]};
        mma_bf16(part, columns, is_mine ? low[layer(h)].x : 0, is_mine ? low[layer(h)].y : 0);
#pragma unroll
        for (int i = 0; i < 4; ++i)
          if (mine.output[i % 2] == run[j]) sums[h][i] = part[i];
      }
    }
  }
  /// The sums of all CTAs and their changes, of the rows [from, next) that the fetched runs have,
  /// and the squares of the lane's row of the lows.
  __device__ __forceinline__ void sum(const Work& work, u32 base, const ChangeTable& table,
                                      int from, float (&totals)[kHalves][4], float& square) const {
    const int lane = threadIdx.x % 32, line = row + lane / 4, at = lane % 4 * 4;
    Own mine{line < kRows ? table.of_row[line] : ChangeTable::kNoRun, {}};
    bool is_output[2];
#pragma unroll
    for (int r = 0; r < 2; ++r) {
      const int own_row = row + lane % 4 * 2 + r;
      mine.output[r] = table.of_row[min(own_row, kRows - 1)];
      is_output[r] = own_row >= from && own_row < next;
    }
    square = 0;
    const u32 place = base + ((row + lane % 4 * 2) * L::kPitch + own) * 4;
    bool is_low[kLows];
#pragma unroll
    for (int l = 0; l < kLows; ++l)
      is_low[l] = mine.low != ChangeTable::kNoRun &&
                  at < table.runs[l][min(mine.low, kMostRuns - 1)].rank;
#pragma unroll 1
    for (int begin = 0; begin < work.p.split; begin += kPartsAtOnce) {
      uint2 low[kPartsAtOnce][kLows];
      float sums[kPartsAtOnce][kHalves][4], squares[kPartsAtOnce];
#pragma unroll
      for (int j = 0; j < kPartsAtOnce; ++j) {
        const int s = min(begin + j, work.p.split - 1);
#pragma unroll
        for (int l = 0; l < kLows; ++l)
          low[j][l] = load_low(part_of_low(work, l, line, s), at, is_low[l]);
#pragma unroll
        for (int h = 0; h < kHalves; ++h) {
#pragma unroll
          for (int r = 0; r < 2; ++r) {
            const float2 two = load2_from(
                place + (r * L::kPitch + layer(h) * (L::kColumns / 2)) * 4, s);
            sums[j][h][r] = two.x, sums[j][h][2 + r] = two.y;
          }
        }
        squares[j] = 0;
        if (work.is_normed()) {
          const u32 squares_of = base + L::kSquares + line * 4;
          squares[j] = load_from(squares_of, s) + load_from(squares_of + kRows * 4, s);
        }
      }
#pragma unroll
      for (int j = 0; j < kPartsAtOnce; ++j) {
        if (begin + j >= work.p.split) break;
        add_runs(mine, low[j], sums[j]);
        square += squares[j];
#pragma unroll
        for (int h = 0; h < kHalves; ++h) {
#pragma unroll
          for (int i = 0; i < 4; ++i) totals[h][i] += is_output[i % 2] ? sums[j][h][i] : 0.f;
        }
      }
    }
  }
  /// sum() of any ranks, in the same order: out of the way, as code has to come from memory too.
  static __device__ __noinline__ PieceSums deep_sum(const Arguments& p, int which, int first_column,
                                                    int rank, u32 base, const ChangeTable& table,
                                                    int row, int own, int from, int next) {
    const Work work{p, p.few, p.few.sums[which], which, first_column, 0, 0, rank};
    const int lane = threadIdx.x % 32, line = row + lane / 4,
              mine = line < kRows ? table.of_row[line] : ChangeTable::kNoRun;
    const u32 place = base + ((row + lane % 4 * 2) * L::kPitch + own) * 4;
    PieceSums y{};
#pragma unroll 1
    for (int s = 0; s < p.split; ++s) {
      if (work.is_normed()) {
        const u32 squares = base + L::kSquares + line * 4;
        y.square += load_from(squares, s) + load_from(squares + kRows * 4, s);
      }
#pragma unroll
      for (int h = 0; h < kHalves; ++h) {
        const u32 at = place + (layer(h) * (L::kColumns / 2)) * 4;
        const float2 lower = load2_from(at, s), upper = load2_from(at + L::kPitch * 4, s);
        float sums[4] = {lower.x, upper.x, lower.y, upper.y};
#pragma unroll 1
        for (int of_row = from; of_row < next; of_row = table.after[of_row]) {
          const int of = table.of_row[of_row];
          if (of == ChangeTable::kNoRun) continue;
          float part[4] = {sums[0], sums[1], sums[2], sums[3]};
          add_deep_change(work, table.runs[layer(h)][of], layer(h), line, mine == of,
                          first_column + own, s, part);
#pragma unroll
          for (int i = 0; i < 4; ++i)
            if (table.of_row[min(row + lane % 4 * 2 + i % 2, kRows - 1)] == of) sums[i] = part[i];
        }
#pragma unroll
        for (int i = 0; i < 4; ++i) {
          const int own_row = row + lane % 4 * 2 + i % 2;
          y.totals[h][i] += own_row >= from && own_row < next ? sums[i] : 0.f;
        }
      }
    }
    return y;
  }
  static __device__ __forceinline__ void add_deep_change(const Work& work,
                                                         const ChangeTable::Run& run, int layer,
                                                         int line, bool is_own, int first, int s,
                                                         float (&part)[4]) {
#pragma unroll 1
    for (int begin = 0; begin < run.rank; begin += kLowColumns) {
      const int at = begin + threadIdx.x % 4 * 4;
      uint2 b[2];
#pragma unroll
      for (int c = 0; c < 2; ++c)
        b[c] = load_factor4(run.b + static_cast<int64_t>(first + c) * run.b_stride, at, run.rank,
                            first + c < work.sum.columns);
      const uint2 x = load_low(part_of_low(work, layer, line, s), at, is_own && at < run.rank);
      const u32 columns[4] = {b[0].x, b[1].x, b[0].y, b[1].y};
      mma_bf16(part, columns, x.x, x.y);
    }
  }
};

#endif

}  // namespace heddle::ops::cuda::batch_row
