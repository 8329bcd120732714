// Sums of products of a few rows, as one token of a few sequences needs them. The time is that of
// reading the matrices once. A CTA takes kColumns columns of one sum and its warps share the depth
// in blocks of kDepth; several blocks are under way. The products are mma.m16n8k16 with the columns
// of b as its 16 and the rows of a as its 8, so that up to 16 rows cost no more arithmetic than
// reading time. Which element of the depth goes to which lane is free as long as both operands
// agree: a lane reads 8 in a row, 16 bytes, of two columns and of a row. The warps' sums meet in
// shared memory in their order: a column's bits depend on neither the other columns nor the number
// of rows.
//
// b is a weight in every call: a launch of a recording reads it before it waits for the launches
// that make a (dependent_launch.cuh).
//
// All sums of a call share the launch: at these sizes a launch costs as much as the reading. For
// the same reason the launch takes in what stands before and after the products:
// - The norm of a: its weight is applied while a is read, and the rows' squares, which the warps
//   see anyway, give the factor of the finished sum.
// - SwiGLU: the low 8 of a CTA's 16 columns are columns of gate, the high 8 the same ones of up.
// - Low-rank changes: where all rows share one set, each CTA makes low = a A^T beside its wide
//   products: A is small, and all read it from the cache. Otherwise the first CTAs of the launch
//   make the lows, each 16 columns of up to 8 rows, while the others sum up the wide products and
//   wait for a count of the first ones before they multiply by B. CTAs start in the order of their
//   numbers, and the first ones wait for nobody. Both ways sum in one order. Which rows have which
//   A and B may stand in tables on the device, so that a recorded launch serves any sets; a row's
//   bits depend on neither the others nor their sets.
//
// On-chip memory of a CTA: the sums of its warps, 16 x 8 floats each for every 8 rows, and their
// squares. With changes: the outputs of two; of one set the warps' sums of its lows, and these.
#include "ops/linear/cuda/few_rows.h"

#include <algorithm>
#include <mutex>
#include <stdexcept>
#include <string>
#include <type_traits>

#include "ops/linear/cuda/few_row_changes.cuh"

namespace heddle::ops::cuda {
namespace {

using namespace few_row;

/// Low-rank changes of a launch.
enum class Changes {
  kNone,
  kOneSet,  ///< Rows that have a change have the same set's, of ranks up to kColumns.
  kRuns,    ///< Runs of rows, each with a set of its own.
};

template <int kTiles, int kWarps>
struct LowShared {
  __align__(16) bf16 lows[kTiles * 8][kDepth];  ///< Zeros beyond the rank.
  float sums[kWarps][kTiles][8][kColumns];
  bool has_set[kTiles * 8];
};
struct Nothing {};

template <int kTiles, int kWarps, Changes kKind>
struct Shared {
  float sums[kWarps][kTiles][8][kColumns];
  float squares[kWarps][kTiles][8];
  static constexpr int kChanges = kKind == Changes::kRuns ? 2 : 1;
  float changes[kChanges][kTiles * 8][kColumns];  // without changes not used
  std::conditional_t<kKind == Changes::kOneSet, LowShared<kTiles, kWarps>, Nothing> low;
};

/// The products of all rows with the A of one set, of which each warp has a part of the depth, and
/// their product with B.
template <int kTiles, int kWarps, class S>
struct OneSet {
  /// Blocks of A on their way: as many as registers are left.
  static constexpr int kAtOnce = (kWarps > 8 ? kAhead : kAhead / 2) / kTiles;
  RunOfChange set;
  Vector a[kAtOnce][2];
  float total[kTiles][4] = {};

  __device__ __forceinline__ void fetch(int depth, int base) {
    const int line = threadIdx.x % 32 / 4, place = threadIdx.x % 4 * 8;
#pragma unroll
    for (int n = 0; n < kAtOnce; ++n) {
      const int at = base + n * kWarps * kDepth + place;
      a[n][0] = {}, a[n][1] = {};
      if (at >= depth) continue;
      if (line < set.rank) a[n][0] = load<8>(set.a + line * set.a_stride + at);
      if (line + 8 < set.rank) a[n][1] = load<8>(set.a + (line + 8) * set.a_stride + at);
    }
  }
  /// Adds the products of kAhead blocks; the first ones of A have been fetched.
  __device__ __forceinline__ void add(int depth, int base, const Vector (&x)[kAhead][kTiles]) {
#pragma unroll
    for (int n = 0; n < kAhead; ++n) {
      if (n > 0 && n % kAtOnce == 0) fetch(depth, base + n * kWarps * kDepth);
      multiply(total, a[n % kAtOnce][0], a[n % kAtOnce][1], x[n]);
    }
  }
  /// By the CTA, of which each warp has put its sums there.
  template <class Factor>
  __device__ __forceinline__ void make_lows(S& shared, const Factor& rstd, bool is_normed) const {
    for (int i = threadIdx.x; i < kTiles * 8 * kDepth; i += kWarps * 32) {
      const int row = i / kDepth, column = i % kDepth;
      float y = 0;
      if (column < set.rank && shared.low.has_set[row]) {
#pragma unroll
        for (int w = 0; w < kWarps; ++w) y += shared.low.sums[w][row / 8][row % 8][column];
        if (is_normed) y *= rstd(row);
      }
      shared.low.lows[row][column] = __float2bfloat16_rn(y * set.scale);
    }
  }
  /// By a warp: the changes of 8 rows of the CTA's columns.
  __device__ __forceinline__ void put_changes(S& shared, int tile, const Vector& low_columns,
                                              const Vector& high_columns) const {
    const int lane = threadIdx.x % 32, line = lane / 4, place = lane % 4 * 8;
    float output[1][4] = {};
    Vector low[1] = {
        *reinterpret_cast<const Vector*>(&shared.low.lows[tile * 8 + line][place])};
    multiply(output, low_columns, high_columns, low);
#pragma unroll
    for (int i = 0; i < 4; ++i)
      shared.changes[0][tile * 8 + lane % 4 * 2 + i % 2][lane / 4 + i / 2 * 8] = output[0][i];
  }
};

/// kTiles times 8 rows. The more CTAs of 8 warps a multiprocessor holds, the busier is the memory.
template <int kTiles, int kWarps, Changes kChanges>
__global__ void __launch_bounds__(kWarps * 32, kWarps > 8 ? 1 : 4 - kTiles)
    sums_kernel(const __grid_constant__ Arguments p) {
  using S = Shared<kTiles, kWarps, kChanges>;
  constexpr bool kIsOneSet = kChanges == Changes::kOneSet, kHasRuns = kChanges == Changes::kRuns;
  __shared__ __align__(16) S shared;
  let_next_begin();
  int block = static_cast<int>(blockIdx.x);
  if constexpr (kHasRuns) {
    if (block < p.low_blocks) return make_low<kTiles, kWarps>(p, shared, block);
    block -= p.low_blocks;
  }
  int which = 0;
  while (which + 1 < p.count && block >= p.first_block[which + 1]) ++which;
  const FewRowSum& sum = p.sums[which];
  const bool is_gated = sum.up != nullptr, is_normed = p.norm.weight != nullptr;
  const int first = (block - p.first_block[which]) * (is_gated ? 8 : kColumns);
  const int warp = threadIdx.x / 32, lane = threadIdx.x % 32;
  const int line = lane / 4, place = lane % 4 * 8;  // of both operands
  const int row_base = static_cast<int>(blockIdx.y) * kTiles * 8,
            rows = min(p.rows - row_base, kTiles * 8);
  const int low_column = min(first + line, sum.columns - 1),
            high_column = is_gated ? low_column : min(first + line + 8, sum.columns - 1);

  Vector b[kAhead][2], a[kAhead][kTiles];
  const auto fetch_columns = [&](const FewRowTerm& term, const void* high, int base) {
    const bf16* const from_low =
        static_cast<const bf16*>(term.b) + low_column * term.b_stride + place;
    const bf16* const from_high =
        static_cast<const bf16*>(high) + high_column * term.b_stride + place;
#pragma unroll
    for (int n = 0; n < kAhead; ++n) {
      const int at = base + n * kWarps * kDepth;
      b[n][0] = {}, b[n][1] = {};
      if (at + place < term.depth)
        b[n][0] = load<8>(from_low + at), b[n][1] = load<8>(from_high + at);
    }
  };
  const auto fetch_rows = [&](const FewRowTerm& term, int at, Vector(&to)[kTiles]) {
#pragma unroll
    for (int r = 0; r < kTiles; ++r) {
      to[r] = {};
      if (at + place < term.depth && r * 8 + line < rows) {
        to[r] = load_row(term.a, (row_base + r * 8 + line) * term.a_stride + place + at);
      }
    }
  };

  const auto high_of = [&](int t) { return t == 0 && is_gated ? sum.up : sum.terms[t].b; };
  // The matrices are on their way while the rows of a are still being computed.
  fetch_columns(sum.terms[0], high_of(0), warp * kDepth);
  OneSet<kTiles, kWarps, S> one_set;
  Vector factor_low{}, factor_high{};
  if constexpr (kIsOneSet) {
    if (threadIdx.x < kTiles * 8) shared.low.has_set[threadIdx.x] = p.slots.runs == nullptr;
    __syncthreads();
    if (threadIdx.x < static_cast<unsigned>(p.slots.count)) {
      const SlotRun run = load_run(p.slots.runs, threadIdx.x);
      for (int r = 0; r < run.rows && run.slot >= 0; ++r) shared.low.has_set[run.first + r] = true;
    }
    one_set.set = only_set(p, sum.change);
    one_set.fetch(p.depth, warp * kDepth);
    if (warp < kTiles) {
      factor_low = load_factor(one_set.set, low_column, place);
      factor_high = load_factor(one_set.set, high_column, place);
    }
  }
  if constexpr (kHasRuns) {
    // Rows without a change, and halves that a change does not have.
    float* const changes = &shared.changes[0][0][0];
    for (int i = threadIdx.x; i < S::kChanges * kTiles * 8 * kColumns; i += kWarps * 32)
      changes[i] = 0;
    const RunOfChange run = run_of_job<kTiles>(p, sum, warp);
    if (run.rows > 0 && place < run.rank) {
      prefetch(run.b + low_column * run.b_stride + place);
      if (!is_gated) prefetch(run.b + high_column * run.b_stride + place);
    }
    __syncthreads();
  }
  wait_for_previous();

  // The thread's outputs, and on its way what they are added to.
  constexpr int kOutputs = (kTiles * 8 * kColumns + kWarps * 32 - 1) / (kWarps * 32);
  const auto place_of = [&](int n, int& row, int& slot) {
    const int i = threadIdx.x + n * kWarps * 32;
    row = i / kColumns, slot = i % kColumns;
    return row < rows && first + slot < sum.columns && (!is_gated || slot < 8);
  };
  float start[kOutputs];
#pragma unroll
  for (int n = 0; n < kOutputs; ++n) {
    int row, slot;
    start[n] = 0;
    if (place_of(n, row, slot) && sum.start != nullptr)
      start[n] = load_value(sum.start, (row_base + row) * sum.start_stride + first + slot);
  }

  float total[kTiles][4] = {}, squares[kTiles] = {};
  for (int t = 0; t < sum.term_count; ++t) {
    const FewRowTerm& term = sum.terms[t];
    for (int base = warp * kDepth; base < term.depth; base += kWarps * kDepth * kAhead) {
      if (t > 0 || base > warp * kDepth) fetch_columns(term, high_of(t), base);
#pragma unroll
      for (int n = 0; n < kAhead; ++n) fetch_rows(term, base + n * kWarps * kDepth, a[n]);
#pragma unroll
      for (int n = 0; n < kAhead; ++n) {
        const int column = base + n * kWarps * kDepth + place;
        if (t == 0 && is_normed && column < term.depth) apply_norm(p.norm, column, a[n], squares);
        multiply(total, b[n][0], b[n][1], a[n]);
      }
      if constexpr (kIsOneSet) {
        if (t > 0) continue;
        if (base > warp * kDepth) one_set.fetch(p.depth, base);
        one_set.add(p.depth, base, a);
      }
    }
  }
  put(shared.sums[warp], total);
  if constexpr (kIsOneSet) put(shared.low.sums[warp], one_set.total);
#pragma unroll
  for (int r = 0; r < kTiles; ++r) {
    const float square = lane_sum<4>(squares[r]);
    if (lane % 4 == 0) shared.squares[warp][r][line] = square;
  }
  // While this CTA waits, the memory brings the columns of the one that takes its place.
  const auto bring_successor_near = [&] {
    const int next = block + p.resident;
    if (warp != kWarps - 1 || lane >= kColumns || next >= p.first_block[p.count]) return;
    int other = which;
    while (other + 1 < p.count && next >= p.first_block[other + 1]) ++other;
    const FewRowSum& after = p.sums[other];
    const bool is_high = after.up != nullptr && lane >= 8;
    const int column = (next - p.first_block[other]) * (after.up != nullptr ? 8 : kColumns) +
                       (is_high ? lane - 8 : lane);
    if (column < after.columns)
      bring_near(static_cast<const bf16*>(is_high ? after.up : after.terms[0].b) +
                     column * after.terms[0].b_stride,
                 static_cast<u32>(after.terms[0].depth * 2));
  };
  if constexpr (kHasRuns) {
    const int jobs = (p.slots.runs != nullptr ? p.slots.count : kTiles) * (is_gated ? 2 : 1);
    bring_successor_near();
    for (int job = warp; job < jobs; job += kWarps) {
      const RunOfChange run = run_of_job<kTiles>(p, sum, job);
      const bool is_idle = run.rows <= 0 || run.rank == 0, has_low = run.which == 0,
                 has_high = !is_gated || run.which == 1;
      const FewRowChange& change = has_low ? sum.change : sum.up_change;
      Vector columns[2] = {};
      const auto fetch_factor = [&](int at) {
        columns[0] = has_low ? load_factor(run, low_column, at) : Vector{};
        columns[1] = has_high ? load_factor(run, high_column, at) : Vector{};
      };
      if (!is_idle) fetch_factor(place);
      if (job == warp) wait_for_lows(p, static_cast<u32>(p.low_blocks));
      if (is_idle) continue;
      float output[1][4] = {};
      for (int at = place; at - place < run.rank; at += kDepth) {
        if (at > place) fetch_factor(at);
        Vector low[1] = {};
        if (line < run.rows && at < run.rank)
          low[0] = load_row(change.low, (run.first + line) * change.low_stride + at);
        multiply(output, columns[0], columns[1], low);
      }
#pragma unroll
      for (int i = 0; i < 4; ++i) {
        const int row = lane % 4 * 2 + i % 2;
        if (row < run.rows && (i < 2 ? has_low : has_high))
          shared.changes[run.which][run.first + row][lane / 4 + i / 2 * 8] = output[0][i];
      }
    }
  }
  __syncthreads();
  if constexpr (kHasRuns) {
    if (threadIdx.x == 0) leave_lows(p, gridDim.x - static_cast<u32>(p.low_blocks));
  }
  const auto rstd = [&](int row) {
    if (!is_normed) return 1.f;
    float square = 0;
#pragma unroll
    for (int w = 0; w < kWarps; ++w) square += shared.squares[w][row / 8][row % 8];
    return rsqrtf(square / sum.terms[0].depth + p.norm.eps);
  };
  if constexpr (kIsOneSet) {
    one_set.make_lows(shared, rstd, is_normed);
    __syncthreads();
    if (warp < kTiles) one_set.put_changes(shared, warp, factor_low, factor_high);
    __syncthreads();
  }

#pragma unroll
  for (int n = 0; n < kOutputs; ++n) {
    int row, slot;
    if (!place_of(n, row, slot)) continue;
    const auto value = [&](int of) {
      float y = 0;
#pragma unroll
      for (int w = 0; w < kWarps; ++w) y += shared.sums[w][row / 8][row % 8][of];
      y *= rstd(row);
      if constexpr (kIsOneSet || kHasRuns) {
#pragma unroll
        for (int c = 0; c < S::kChanges; ++c) y += shared.changes[c][row][of];
      }
      return y * sum.scale;
    };
    float y = value(slot);
    if (is_gated) {
      const float gate = __bfloat162float(__float2bfloat16_rn(y)),
                  up = __bfloat162float(__float2bfloat16_rn(value(slot + 8)));
      y = gate * sigmoid(gate) * up;
    }
    static_cast<bf16*>(sum.y)[(row_base + row) * sum.y_stride + first + slot] =
        __float2bfloat16_rn(y + start[n]);
  }
}

constexpr int kFewBlocks = 128;

void check(cudaError_t status) {
  if (status != cudaSuccess)
    throw std::runtime_error(std::string("few_row_sums: ") + cudaGetErrorString(status));
}

template <int kTiles, int kWarps, Changes kChanges>
void launch(Arguments& p, int blocks, cudaStream_t stream) {
  static const int per_multiprocessor = [] {
    int count = 0;
    check(cudaOccupancyMaxActiveBlocksPerMultiprocessor(
        &count, sums_kernel<kTiles, kWarps, kChanges>, kWarps * 32, 0));
    return count;
  }();
  p.resident = per_multiprocessor * multiprocessors();
  const dim3 grid(static_cast<unsigned>(blocks + p.low_blocks),
                  static_cast<unsigned>((p.rows + kTiles * 8 - 1) / (kTiles * 8)));
  launch_dependent(sums_kernel<kTiles, kWarps, kChanges>, grid, dim3(kWarps * 32), 0, stream, p);
}

/// A launch of few CTAs needs more warps in each to keep the memory busy.
template <int kTiles, Changes kChanges>
void launch(Arguments& p, int blocks, cudaStream_t stream) {
  blocks <= kFewBlocks ? launch<kTiles, 16, kChanges>(p, blocks, stream)
                       : launch<kTiles, 8, kChanges>(p, blocks, stream);
}

template <Changes kChanges>
void launch(Arguments& p, int blocks, cudaStream_t stream) {
  p.rows <= 8 ? launch<1, kChanges>(p, blocks, stream) : launch<2, kChanges>(p, blocks, stream);
}

}  // namespace

// A recording has a hundred pairs; two that run at once, on streams of their own, share none unless
// a process has recorded more than there are.
u32* few_row::next_counters() {
  constexpr int kMostDevices = 64;
  constexpr unsigned kPairs = 1 << 16;
  static std::mutex mutex;
  static u32* all[kMostDevices] = {};
  static unsigned next = 0;
  int device = 0;
  check(cudaGetDevice(&device));
  const std::lock_guard lock(mutex);
  if (device >= kMostDevices) throw std::runtime_error("few_row_sums: too many devices");
  if (all[device] == nullptr) {
    check(cudaMalloc(&all[device], kPairs * 2 * sizeof(u32)));
    check(cudaMemset(all[device], 0, kPairs * 2 * sizeof(u32)));
    check(cudaDeviceSynchronize());
  }
  return all[device] + 2 * (next++ % kPairs);
}

void few_row_sums(int rows, const std::vector<FewRowSum>& sums, cudaStream_t stream,
                  const FewRowNorm& norm, const FewRowSlots& slots) {
  if (rows < 1 || sums.empty() || sums.size() > kMostFewRowSums)
    throw std::invalid_argument("few_row_sums: too many sums, or no rows");
  Arguments p{};
  p.count = static_cast<int>(sums.size());
  p.rows = rows;
  p.norm = norm;
  p.slots = slots;
  const FewRowTerm& input = sums[0].terms[0];
  p.x = input.a;
  p.x_stride = input.a_stride;
  p.depth = input.depth;
  const int kept_tiles = rows <= 8 ? 1 : 2, runs = slots.runs != nullptr ? slots.count : kept_tiles;
  int blocks = 0, deepest = 0;
  for (int i = 0; i < p.count; ++i) {
    const FewRowSum& sum = p.sums[i] = sums[static_cast<std::size_t>(i)];
    p.first_block[i] = blocks;
    const int columns = sum.up != nullptr ? 8 : kColumns;
    blocks += (sum.columns + columns - 1) / columns;
    for (int t = 0; t < sum.term_count; ++t) deepest = std::max(deepest, sum.terms[t].depth);
  }
  p.first_block[p.count] = blocks;
  const int low_tiles = p.add_lows();
  const bool is_changed = low_tiles > 0;
  if (rows > kMostFewRows && is_changed)
    throw std::invalid_argument("few_row_sums: too many rows for changes");
  if (is_changed) {
    if (p.has_one_set() && !p.has_gates()) {
      launch<Changes::kOneSet>(p, blocks, stream);
    } else {
      p.low_blocks = low_tiles * runs;
      p.counters = next_counters();
      launch<Changes::kRuns>(p, blocks, stream);
    }
  } else if (deepest <= kDepth * kAhead) {
    launch<2, 1, Changes::kNone>(p, blocks, stream);  // one warp sums them alone
  } else {
    launch<Changes::kNone>(p, blocks, stream);
  }
  check_launch("few_row_sums");
}

}  // namespace heddle::ops::cuda
