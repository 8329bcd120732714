// Work of a CTA of the lows: 16 columns of one layer's low of one run, up to 8 rows, whose warps
// share the depth as those of few_rows.cu do. Of the outputs: a warp has 64 columns of one run. A
// row's bits depend on its own set and on neither the other rows nor their sets: which run, slot or
// place in a run it has changes nothing in the order of its sums.
//
// A recorded launch has CTAs for as many runs as there are rows; what is left of them ends at once.
#include "ops/grouped_low_rank/cuda/slot_products.h"

#include <array>
#include <stdexcept>
#include <string>

#include "ops/cuda/dependent_launch.cuh"
#include "ops/linear/cuda/few_row_parts.cuh"

namespace heddle::ops::cuda {
namespace {

constexpr int kColumns = kFewRowColumns, kDepth = kFewRowDepth, kAhead = 4, kLowWarps = 16;
using Vector = FewRowVector;

struct Lows {
  SlotLayers slots;
  const void* x;
  int64_t x_stride;
  int depth;
  bf16* lows;
  int columns[kMostSlotLayers];
};

__global__ void __launch_bounds__(kLowWarps * 32, 1) lows_kernel(const __grid_constant__ Lows p) {
  __shared__ __align__(16) float sums[kLowWarps][1][8][kColumns];
  const int tiles = p.slots.rank / kColumns, layer = static_cast<int>(blockIdx.x) / tiles,
            first = static_cast<int>(blockIdx.x) % tiles * kColumns;
  const SlotRun run = load_run(p.slots.runs, static_cast<int>(blockIdx.y));
  const SlotFactors factors =
      run.rows > 0 && run.slot >= 0 ? load_factors(p.slots.layers[layer], run.slot) : SlotFactors{};
  if (first >= factors.rank) return;
  const int warp = threadIdx.x / 32, lane = threadIdx.x % 32, line = lane / 4, place = lane % 4 * 8;
  const bf16* const from = static_cast<const bf16*>(factors.a) + place;
  const bool has_low = first + line < factors.rank, has_high = first + line + 8 < factors.rank;
  Vector a[kAhead][2], x[kAhead][1];
  const auto fetch_factor = [&](int base) {
#pragma unroll
    for (int n = 0; n < kAhead; ++n) {
      const int at = base + n * kLowWarps * kDepth;
      a[n][0] = {}, a[n][1] = {};
      if (at + place >= p.depth) continue;
      if (has_low) a[n][0] = load<8>(from + static_cast<int64_t>(first + line) * p.depth + at);
      if (has_high) a[n][1] = load<8>(from + static_cast<int64_t>(first + line + 8) * p.depth + at);
    }
  };
  fetch_factor(warp * kDepth);
  if (lane == 0) {  // this warp's share of the CTA's share of b
    const int own_tiles = (factors.rank + kColumns - 1) / kColumns, shares = own_tiles * kLowWarps,
              share = first / kColumns * kLowWarps + warp;
    const int64_t vectors = static_cast<int64_t>(p.columns[layer]) * factors.rank / 8,
                  begin = vectors * share / shares, end = vectors * (share + 1) / shares;
    bring_near(static_cast<const uint4*>(factors.b) + begin, static_cast<u32>(end - begin) * 16);
  }
  float total[1][4] = {};
  for (int base = warp * kDepth; base < p.depth; base += kLowWarps * kDepth * kAhead) {
    if (base > warp * kDepth) fetch_factor(base);
#pragma unroll
    for (int n = 0; n < kAhead; ++n) {
      const int at = base + n * kLowWarps * kDepth + place;
      x[n][0] = {};
      if (at < p.depth && line < run.rows)
        x[n][0] = load_row(p.x, (run.first + line) * p.x_stride + at);
    }
#pragma unroll
    for (int n = 0; n < kAhead; ++n) multiply(total, a[n][0], a[n][1], x[n]);
  }
  put(sums[warp], total);
  __syncthreads();
  const int row = static_cast<int>(threadIdx.x) / kColumns,
            column = static_cast<int>(threadIdx.x) % kColumns;
  if (row >= run.rows) return;
  float y = 0;
#pragma unroll
  for (int w = 0; w < kLowWarps; ++w) y += sums[w][0][row][column];
  p.lows[static_cast<int64_t>(run.first + row) * p.slots.count * p.slots.rank +
         layer * p.slots.rank + first + column] = __float2bfloat16_rn(y * factors.scale);
}

constexpr int kOutputWarps = 4, kSpan = 64;

struct Outputs {
  SlotLayers slots;
  const bf16* lows;
  SlotOutput outputs[kMostSlotLayers];
  int first_tile[kMostSlotLayers];
  int tiles;
};

/// Products of one layer's factor b with the lows of a run. Which column stands in which line of a
/// product is free: lane 4 g + t has rows 2 t and 2 t + 1 of columns 8 g to 8 g + 7 of the 64,
/// which are 16 bytes of y.
struct OutputTile {
  const Outputs& p;
  const SlotRun& run;
  SlotFactors factors;
  int layer, column, valid;  // of this lane's columns, those that there are
  uint2 b[4][2];

  __device__ __forceinline__ OutputTile(const Outputs& p, const SlotRun& run, int layer, int tile)
      : p(p),
        run(run),
        factors(run.slot >= 0 ? load_factors(p.slots.layers[layer], run.slot) : SlotFactors{}),
        layer(layer),
        column(tile * kSpan + static_cast<int>(threadIdx.x) % 32 / 4 * 8),
        valid(min(8, p.outputs[layer].columns - column)) {}

  __device__ __forceinline__ bool is_wide() const {
    return valid == 8 && p.outputs[layer].stride % 8 == 0;
  }
  __device__ __forceinline__ int64_t place(int row) const {
    return (run.first + row) * p.outputs[layer].stride + column;
  }
  __device__ __forceinline__ void fetch(int at) {
    const int t = static_cast<int>(threadIdx.x) % 4;
    const bf16* const from = static_cast<const bf16*>(factors.b);
#pragma unroll
    for (int j = 0; j < 8; ++j)
      b[j / 2][j % 2] = load_factor4(from + static_cast<int64_t>(column + j) * factors.rank,
                                     at + 4 * t, factors.rank, j < valid);
  }
  /// y and the change, after fetch(0) unless the rank is 0.
  __device__ __forceinline__ void values(float (&y)[2][8]) {
    const int g = static_cast<int>(threadIdx.x) % 32 / 4, t = static_cast<int>(threadIdx.x) % 4;
    const bf16* const from = static_cast<const bf16*>(p.outputs[layer].y);
    Vector before[2] = {};
#pragma unroll
    for (int r = 0; r < 2; ++r) {
      if (2 * t + r < run.rows && is_wide()) before[r] = load_row(from, place(2 * t + r));
    }
    float sums[4][4] = {};
    const bf16* const low = p.lows +
                            static_cast<int64_t>(run.first + g) * p.slots.count * p.slots.rank +
                            layer * p.slots.rank;
    for (int at = 0; at < factors.rank; at += 16) {
      if (at > 0) fetch(at);
      uint2 x = make_uint2(0, 0);
      if (g < run.rows) x = __ldcg(reinterpret_cast<const uint2*>(low + at + 4 * t));
#pragma unroll
      for (int j = 0; j < 4; ++j) {
        const u32 columns[4] = {b[j][0].x, b[j][1].x, b[j][0].y, b[j][1].y};
        mma_bf16(sums[j], columns, x.x, x.y);
      }
    }
#pragma unroll
    for (int r = 0; r < 2; ++r) {
      unpack(before[r], y[r]);
#pragma unroll
      for (int j = 0; j < 8; ++j) {
        if (!is_wide() && 2 * t + r < run.rows && j < valid)
          y[r][j] = load_value(from, place(2 * t + r) + j);
        y[r][j] += sums[j / 2][r + j % 2 * 2];
      }
    }
  }
  /// Writes the thread's outputs to `y`, which lies like the layer's.
  __device__ __forceinline__ void write(void* y, const float (&values)[2][8]) const {
    const int t = static_cast<int>(threadIdx.x) % 4;
    bf16* const to = static_cast<bf16*>(y);
#pragma unroll
    for (int r = 0; r < 2; ++r) {
      if (2 * t + r >= run.rows) continue;
      if (is_wide()) {
        store(to + place(2 * t + r), pack<bf16>(values[r]));
        continue;
      }
#pragma unroll
      for (int j = 0; j < 8; ++j) {
        if (j < valid) to[place(2 * t + r) + j] = __float2bfloat16_rn(values[r][j]);
      }
    }
  }
};

__global__ void __launch_bounds__(kOutputWarps * 32, 6)
    outputs_kernel(const __grid_constant__ Outputs p) {
  const SlotRun run = load_run(p.slots.runs, static_cast<int>(blockIdx.y));
  const int tile = static_cast<int>(blockIdx.x * kOutputWarps + threadIdx.x / 32);
  int layer = 0;
  while (layer + 1 < p.slots.count && tile >= p.first_tile[layer + 1]) ++layer;
  if (run.rows == 0 || run.slot < 0 || tile >= p.tiles) {
    // Not before the launches ahead: the next one takes the end of this one for theirs.
    wait_for_previous();
    return;
  }
  OutputTile own(p, run, layer, tile - p.first_tile[layer]);
  if (own.factors.rank > 0) own.fetch(0);
  wait_for_previous();
  if (own.factors.rank == 0) return;
  float y[2][8];
  own.values(y);
  own.write(p.outputs[layer].y, y);
}

/// silu(gate) * up of two layers, both rounded to bf16 first; of all runs, rows without a set too.
__global__ void __launch_bounds__(kOutputWarps * 32)
    gated_kernel(const __grid_constant__ Outputs p, void* gated) {
  const SlotRun run = load_run(p.slots.runs, static_cast<int>(blockIdx.y));
  const int tile = static_cast<int>(blockIdx.x * kOutputWarps + threadIdx.x / 32);
  if (run.rows == 0 || tile >= p.first_tile[1]) {
    wait_for_previous();
    return;
  }
  OutputTile gate(p, run, 0, tile), up(p, run, 1, tile);
  if (gate.factors.rank > 0) gate.fetch(0);
  if (up.factors.rank > 0) up.fetch(0);
  wait_for_previous();
  float g[2][8], u[2][8];
  gate.values(g);
  up.values(u);
#pragma unroll
  for (int r = 0; r < 2; ++r) {
#pragma unroll
    for (int j = 0; j < 8; ++j) {
      const float x = __bfloat162float(__float2bfloat16_rn(g[r][j])),
                  y = __bfloat162float(__float2bfloat16_rn(u[r][j]));
      g[r][j] = x * sigmoid(x) * y;
    }
  }
  gate.write(gated, g);
}

Outputs outputs_of(const SlotLayers& slots, const void* lows,
                   const std::vector<SlotOutput>& outputs) {
  if (outputs.size() != static_cast<std::size_t>(slots.count) || slots.count > kMostSlotLayers)
    throw std::invalid_argument("add_slot_outputs: another number of layers");
  Outputs p{slots, static_cast<const bf16*>(lows), {}, {}, 0};
  for (int i = 0; i < slots.count; ++i) {
    p.outputs[i] = outputs[static_cast<std::size_t>(i)];
    p.first_tile[i] = p.tiles;
    p.tiles += (p.outputs[i].columns + kSpan - 1) / kSpan;
  }
  return p;
}

dim3 output_grid(int tiles, int runs) {
  return dim3(static_cast<unsigned>((tiles + kOutputWarps - 1) / kOutputWarps),
              static_cast<unsigned>(runs));
}

void check(cudaError_t status) {
  if (status != cudaSuccess)
    throw std::runtime_error(std::string("a side stream: ") + cudaGetErrorString(status));
}

}  // namespace

void slot_lows(const SlotLayers& slots, const void* x, int64_t x_stride, int depth, void* lows,
               const std::vector<int>& columns, cudaStream_t stream) {
  if (slots.count < 1 || slots.count > kMostSlotLayers || slots.rank % kColumns != 0 ||
      columns.size() != static_cast<std::size_t>(slots.count))
    throw std::invalid_argument("slot_lows: too many layers, or a rank that is no multiple of 16");
  if (slots.run_count == 0 || slots.rank == 0) return;
  Lows p{slots, x, x_stride, depth, static_cast<bf16*>(lows), {}};
  for (int i = 0; i < slots.count; ++i) p.columns[i] = columns[static_cast<std::size_t>(i)];
  const dim3 grid(static_cast<unsigned>(slots.count * (slots.rank / kColumns)),
                  static_cast<unsigned>(slots.run_count));
  lows_kernel<<<grid, kLowWarps * 32, 0, stream>>>(p);
  check_launch("slot_lows");
}

void add_slot_outputs(const SlotLayers& slots, const void* lows,
                      const std::vector<SlotOutput>& outputs, cudaStream_t stream) {
  const Outputs p = outputs_of(slots, lows, outputs);
  if (slots.run_count == 0 || slots.rank == 0) return;
  launch_dependent(outputs_kernel, output_grid(p.tiles, slots.run_count), dim3(kOutputWarps * 32),
                   0, stream, p);
  check_launch("add_slot_outputs");
}

void gated_slot_outputs(const SlotLayers& slots, const void* lows, const SlotOutput& gate,
                        const SlotOutput& up, void* gated, cudaStream_t stream) {
  if (gate.columns != up.columns || gate.stride != up.stride)
    throw std::invalid_argument("gated_slot_outputs: gate and up lie differently");
  const Outputs p = outputs_of(slots, lows, {gate, up});
  if (slots.run_count == 0) return;
  launch_dependent(gated_kernel, output_grid(p.first_tile[1], slots.run_count),
                   dim3(kOutputWarps * 32), 0, stream, p, gated);
  check_launch("gated_slot_outputs");
}

SideStream& SideStream::current() {
  constexpr int kMostDevices = 64;
  thread_local std::array<SideStream, kMostDevices> all;
  int device = 0;
  check(cudaGetDevice(&device));
  return all.at(static_cast<std::size_t>(device));
}

cudaStream_t SideStream::fork(cudaStream_t stream) {
  if (side_ == nullptr) {
    check(cudaStreamCreateWithFlags(&side_, cudaStreamNonBlocking));
    check(cudaEventCreateWithFlags(&begun_, cudaEventDisableTiming));
    check(cudaEventCreateWithFlags(&done_, cudaEventDisableTiming));
  }
  check(cudaEventRecord(begun_, stream));
  check(cudaStreamWaitEvent(side_, begun_, 0));
  is_forked_ = true;
  return side_;
}

void SideStream::join(cudaStream_t stream) {
  if (!is_forked_) return;
  is_forked_ = false;
  check(cudaEventRecord(done_, side_));
  check(cudaStreamWaitEvent(stream, done_, 0));
}

}  // namespace heddle::ops::cuda
