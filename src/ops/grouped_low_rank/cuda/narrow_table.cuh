// Parts that the kernels of narrow products share: their table, clusters that share the depth of a
// tile, and how a launch is cut into them.
#pragma once

#include <algorithm>
#include <array>
#include <cstdint>

#include "ops/cuda/mma.cuh"
#include "ops/grouped_low_rank/cuda/grouped_products.h"
#include "ops/grouped_low_rank/cuda/table.cuh"

namespace heddle::ops::cuda {

constexpr int kNarrowColumns = 64;  ///< Columns of a tile.
constexpr int kMostParts = 8;
constexpr int kLinePitch = kNarrowColumns + 4;  ///< A line of sums in shared memory, in floats.

struct NarrowEntry {
  const bf16 *tall, *narrow;
  void* out;
  int64_t tall_stride;
  int32_t narrow_stride, out_stride, m, k, n, first_tile;
  float scale;
  bool turned, accumulates, is_aligned;
  const bf16* low;
  float* gradient;
  int32_t low_stride;
};

constexpr int kNarrowEntries = 60;
struct NarrowTable {
  NarrowEntry entries[kNarrowEntries];
  int count, parts, tiles;
};
static_assert(sizeof(NarrowTable) <= 32764);  // as many bytes of arguments as a launch takes

__host__ __device__ inline int tiles_along(int size, int tile) { return (size + tile - 1) / tile; }

#if __CUDA_ARCH__ >= 900

/// The sums of all parts at four places that lie together.
__device__ __forceinline__ float4 joined(u32 at, int parts) {
  if (parts == 1) {
    const uint4 own = ld_shared16(at);
    return make_float4(__uint_as_float(own.x), __uint_as_float(own.y), __uint_as_float(own.z),
                       __uint_as_float(own.w));
  }
  float4 each[kMostParts];
#pragma unroll
  for (int part = 0; part < kMostParts; ++part)
    if (part < parts) each[part] = load4_from(at, static_cast<u32>(part));
  float4 total = each[0];
#pragma unroll
  for (int part = 1; part < kMostParts; ++part) {
    if (part >= parts) break;
    total.x += each[part].x;
    total.y += each[part].y;
    total.z += each[part].z;
    total.w += each[part].w;
  }
  return total;
}

/// All members of the cluster, of which there may be one.
__device__ __forceinline__ void meet(int parts) {
  if (parts > 1) {
    asm volatile("barrier.cluster.arrive.release.aligned;\nbarrier.cluster.wait.acquire.aligned;" ::
                     : "memory");
  } else {
    __syncthreads();
  }
}

/// Runs work(stage, step) for the steps [first, last), which load(stage, step) has brought to the
/// stages in turn, all but one ahead.
template <int kStages, u32 kStageBytes, class Load, class Work>
__device__ __forceinline__ void each_step(u32 stages, int first, int last, const Load& load,
                                          const Work& work) {
#pragma unroll
  for (int s = 0; s < kStages - 1; ++s) {
    if (first + s < last) load(stages + s * kStageBytes, first + s);
    cp_async_commit();
  }
  for (int step = first; step < last; ++step) {
    cp_async_wait<kStages - 2>();
    __syncthreads();
    const int next = step + kStages - 1;
    if (next < last) load(stages + (next - first) % kStages * kStageBytes, next);
    cp_async_commit();
    work(stages + (step - first) % kStages * kStageBytes, step);
  }
  cp_async_wait<0>();
  __syncthreads();
}

/// Runs work(entry, tile of it, part, parts) for each tile of the table that this CTA's cluster
/// has.
template <class Work>
__device__ __forceinline__ void each_tile(const NarrowTable& table, const Work& work) {
  const int parts = table.parts, clusters = static_cast<int>(gridDim.x) / parts,
            part = static_cast<int>(blockIdx.x) % parts;
  for (int tile = static_cast<int>(blockIdx.x) / parts; tile < table.tiles; tile += clusters) {
    const NarrowEntry& e = table.entries[entry_of(table.entries, table.count, tile)];
    work(e, tile - e.first_tile, part, parts);
  }
}

/// Two neighbours of a line of gradients.
__device__ __forceinline__ void put_gradients(const NarrowEntry& e, int row, int column, float left,
                                              float right) {
  if (row >= e.k || column >= e.n) return;
  float* const out = e.gradient + static_cast<int64_t>(row) * e.n + column;
  if (e.n % 2 == 0) {
    auto* const both = reinterpret_cast<float2*>(out);
    if (e.accumulates) {
      left += both->x;
      right += both->y;
    }
    *both = make_float2(left, right);
    return;
  }
  out[0] = e.accumulates ? out[0] + left : left;
  if (column + 1 < e.n) out[1] = e.accumulates ? out[1] + right : right;
}

/// A part's share of the lows of a tile, whose sums lie at `from` in the shared memory of each
/// part.
__device__ __forceinline__ void put_lows(const NarrowEntry& e, int m0, int n0, int rows, u32 from,
                                         int part, int parts) {
  const int columns = min(e.n - n0, kNarrowColumns),
            bits = columns <= 16   ? 1
                   : columns <= 32 ? 2
                                   : 3;  // of runs of 8 a line
  bf16* const out = static_cast<bf16*>(e.out) + static_cast<int64_t>(m0) * e.out_stride + n0;
  const int threads = static_cast<int>(blockDim.x);
  for (int i = part * threads + static_cast<int>(threadIdx.x); i < rows << bits;
       i += parts * threads) {
    const int row = i >> bits, column = (i & ((1 << bits) - 1)) * 8;
    if (column >= columns) continue;
    const u32 at = from + (row * kLinePitch + column) * 4;
    const float4 low = joined(at, parts), high = joined(at + 16, parts);
    st_global16(out + static_cast<int64_t>(row) * e.out_stride + column,
                make_uint4(pack_bf16(e.scale * low.x, e.scale * low.y),
                           pack_bf16(e.scale * low.z, e.scale * low.w),
                           pack_bf16(e.scale * high.x, e.scale * high.y),
                           pack_bf16(e.scale * high.z, e.scale * high.w)));
  }
}

#endif

constexpr int kPartsTried = 4;  ///< 1, 2, 4, 8
static_assert(1 << (kPartsTried - 1) == kMostParts);

/// `Kernel`: get() is the kernel, kThreads and kBytes of shared memory are a CTA's, kDepth is a
/// step's and kStepsOfATile are as long as a tile's start and end.
template <class Kernel>
cudaLaunchConfig_t configure(cudaLaunchAttribute& size, int clusters, int parts) {
  size.id = cudaLaunchAttributeClusterDimension;
  size.val.clusterDim = {static_cast<unsigned>(parts), 1, 1};
  cudaLaunchConfig_t config{};
  config.gridDim = dim3(static_cast<unsigned>(clusters * parts));
  config.blockDim = dim3(Kernel::kThreads);
  config.dynamicSmemBytes = Kernel::kBytes;
  config.attrs = &size;
  config.numAttrs = 1;
  return config;
}

/// Clusters of each size that the device holds at once.
template <class Kernel>
const std::array<int, kPartsTried>& clusters_at_once() {
  static const std::array<int, kPartsTried> most = [] {
    cudaFuncSetAttribute(Kernel::get(), cudaFuncAttributeMaxDynamicSharedMemorySize,
                         static_cast<int>(Kernel::kBytes));
    std::array<int, kPartsTried> found{};
    for (int i = 0; i < kPartsTried; ++i) {
      cudaLaunchAttribute size{};
      const cudaLaunchConfig_t config = configure<Kernel>(size, 1, 1 << i);
      cudaOccupancyMaxActiveClusters(&found[i], Kernel::get(), &config);
      found[i] = std::max(1, found[i]);
    }
    return found;
  }();
  return most;
}

/// Steps of the cluster that has most to do: the one with the first of every `clusters` tiles.
template <class Kernel>
int longest(const NarrowTable& table, int clusters, int parts) {
  int steps = 0;
  for (int i = 0, tile = 0; tile < table.tiles; tile += clusters) {
    while (i + 1 < table.count && table.entries[i + 1].first_tile <= tile) ++i;
    steps +=
        tiles_along(tiles_along(table.entries[i].k, Kernel::kDepth), parts) + Kernel::kStepsOfATile;
  }
  return steps;
}

/// Chooses the parts of a tile with which the launch is through first.
template <class Kernel>
void launch_narrow(NarrowTable& table, cudaStream_t stream) {
  if (table.tiles == 0) return;
  int clusters = 0, least = INT32_MAX;
  for (int i = 0; i < kPartsTried; ++i) {
    const int these = std::min(table.tiles, clusters_at_once<Kernel>()[i]),
              steps = longest<Kernel>(table, these, 1 << i);
    if (steps >= least) continue;
    least = steps;
    clusters = these;
    table.parts = 1 << i;
  }
  cudaLaunchAttribute size{};
  cudaLaunchConfig_t config = configure<Kernel>(size, clusters, table.parts);
  config.stream = stream;
  cudaLaunchKernelEx(&config, Kernel::get(), table);
  check_launch("narrow_products");
}

/// Launches products of up to kMostFewRows rows each, of forms kRows and kDeep.
constexpr int kMostFewRows = 64;
void launch_few_rows(NarrowForm form, int most_rows, NarrowTable& table, cudaStream_t stream);

}  // namespace heddle::ops::cuda
