// Work of a CTA: 128 x 64 of one product, 64 in depth a step, by mma.sync; warp w has rows 16 w...
// Products whose tiles do not fill the device are cut along their depth over the CTAs of a cluster,
// which add their sums up in order through each other's shared memory.
//
// Shared memory: 4 stages of both tiles, rows 16 bytes longer than they are, which ldmatrix reads
// without conflicts; then the sums in fp32 in the same place.
#include <algorithm>
#include <stdexcept>

#include "ops/cuda/mma.cuh"
#include "ops/grouped_low_rank/cuda/grouped_products.h"
#include "ops/grouped_low_rank/cuda/table.cuh"

namespace heddle::ops::cuda {
namespace {

constexpr int kTileM = 128, kTileN = 64, kDepth = 64, kStages = 4, kThreads = 256;
constexpr int kTallBytes =
    kTileM * (kDepth + 8) * 2;  // or kDepth * (kTileM + 8) * 2, which is less
constexpr int kNarrowBytes = kTileN * (kDepth + 8) * 2;
constexpr int kStageBytes = kTallBytes + kNarrowBytes;
constexpr int kSumPitch = kTileN + 1;
static_assert(kTileM * kSumPitch * 4 <= kStages * kStageBytes);
constexpr u32 kSharedBytes = kStages * kStageBytes;
constexpr int kMostParts = 8;

struct Entry {
  const bf16 *tall, *narrow;
  void* out;
  int64_t tall_stride;
  int32_t narrow_stride, out_stride, m, k, n, first_tile;
  float scale;
  bool turned, accumulates, is_aligned;
};

constexpr int kEntries = 60;
struct Table {
  Entry entries[kEntries];
  int count, parts;
};
static_assert(sizeof(Table) <= 4096);

__host__ __device__ inline int tiles_along(int size, int tile) { return (size + tile - 1) / tile; }

#if __CUDA_ARCH__ >= 900

/// One tile of an entry.
template <NarrowForm form>
struct Tile {
  const Entry& e;
  int m0, n0;

  __device__ __forceinline__ void load(u32 stage, int step) const {
    const int k0 = step * kDepth;
    const u32 narrow = stage + kTallBytes;
    if constexpr (form == NarrowForm::kGradients) {
      constexpr int kRuns = kTileM / 8;
      for (int i = threadIdx.x; i < kDepth * kRuns; i += kThreads) {
        const int row = i / kRuns, column = i % kRuns * 8;
        const bool is_in = k0 + row < e.k && m0 + column < e.m;
        cp_async16(stage + (row * (kTileM + 8) + column) * 2,
                   is_in ? e.tall + (k0 + row) * e.tall_stride + m0 + column : e.tall, is_in);
      }
    } else {
      constexpr int kRuns = kDepth / 8;
      for (int i = threadIdx.x; i < kTileM * kRuns; i += kThreads) {
        const int row = i / kRuns, column = i % kRuns * 8;
        const bool is_in = m0 + row < e.m && k0 + column < e.k;
        cp_async16(stage + (row * (kDepth + 8) + column) * 2,
                   is_in ? e.tall + (m0 + row) * e.tall_stride + k0 + column : e.tall, is_in);
      }
    }
    constexpr int kRuns = kDepth / 8;  // both sides of the narrow tile are as long
    const int columns = min(e.n - n0, kTileN);
    for (int i = threadIdx.x; i < kDepth * kRuns; i += kThreads) {
      const int row = i / kRuns, column = i % kRuns * 8;
      const u32 to = narrow + (row * (kDepth + 8) + column) * 2;
      if constexpr (form == NarrowForm::kRows) {  // rows are n
        if (row >= tiles_along(columns, 16) * 16) break;
        const bool is_in = row < columns && k0 + column < e.k;
        copy8(to,
              e.narrow + static_cast<int64_t>(is_in ? n0 + row : 0) * e.narrow_stride +
                  (is_in ? k0 + column : 0),
              is_in ? e.k - k0 - column : 0, e.is_aligned);
      } else {  // rows are k
        if (column >= tiles_along(columns, 16) * 16) continue;
        const bool is_in = k0 + row < e.k && column < columns;
        copy8(to,
              e.narrow + static_cast<int64_t>(is_in ? k0 + row : 0) * e.narrow_stride +
                  (is_in ? n0 + column : 0),
              is_in ? (form == NarrowForm::kGradients ? 8 : columns - column) : 0, e.is_aligned);
      }
    }
  }

  template <int NB>
  __device__ __forceinline__ void multiply(float (&sums)[NB][4], u32 stage) const {
    const int warp = threadIdx.x / 32, lane = threadIdx.x % 32, m = lane >> 3, r = lane & 7;
    const u32 narrow = stage + kTallBytes;
#pragma unroll
    for (int k = 0; k < kDepth; k += 16) {
      u32 left[4];
      if constexpr (form == NarrowForm::kGradients) {
        ldmatrix4_trans(
            left, stage + ((k + (m >> 1) * 8 + r) * (kTileM + 8) + warp * 16 + (m & 1) * 8) * 2);
      } else {
        ldmatrix4(left,
                  stage + ((warp * 16 + (m & 1) * 8 + r) * (kDepth + 8) + k + (m >> 1) * 8) * 2);
      }
#pragma unroll
      for (int n = 0; n < NB; n += 2) {
        u32 right[4];
        if constexpr (form == NarrowForm::kRows) {
          ldmatrix4(right,
                    narrow + ((n * 8 + (m >> 1) * 8 + r) * (kDepth + 8) + k + (m & 1) * 8) * 2);
        } else {
          ldmatrix4_trans(
              right, narrow + ((k + (m & 1) * 8 + r) * (kDepth + 8) + n * 8 + (m >> 1) * 8) * 2);
        }
        mma_bf16(sums[n], left, right[0], right[1]);
        mma_bf16(sums[n + 1], left, right[2], right[3]);
      }
    }
  }

  /// The sums of steps [first, last) to shared memory, [kTileM, kSumPitch].
  template <int NB>
  __device__ __forceinline__ void sum(u32 memory, float* to, int first, int last) const {
    float sums[NB][4];
    zero(sums);
#pragma unroll
    for (int s = 0; s < kStages - 1; ++s) {
      if (first + s < last) load(memory + s * kStageBytes, first + s);
      cp_async_commit();
    }
    for (int step = first; step < last; ++step) {
      cp_async_wait<kStages - 2>();
      __syncthreads();
      const int next = step + kStages - 1;
      if (next < last) load(memory + (next - first) % kStages * kStageBytes, next);
      cp_async_commit();
      multiply(sums, memory + (step - first) % kStages * kStageBytes);
    }
    cp_async_wait<0>();
    __syncthreads();
    const int lane = threadIdx.x % 32, row = threadIdx.x / 32 * 16 + (lane >> 2),
              column = (lane & 3) * 2;
#pragma unroll
    for (int n = 0; n < NB; ++n) {
      float* const at = to + row * kSumPitch + n * 8 + column;
      at[0] = sums[n][0];
      at[1] = sums[n][1];
      at[8 * kSumPitch] = sums[n][2];
      at[8 * kSumPitch + 1] = sums[n][3];
    }
  }
};

/// The sum of all parts at a place of the tile.
__device__ __forceinline__ float joined(u32 sums, int row, int column, int parts) {
  const u32 at = sums + (row * kSumPitch + column) * 4;
  float total = 0;
  for (int part = 0; part < parts; ++part) total += load_from(at, static_cast<u32>(part));
  return total;
}

#endif

template <NarrowForm form>
__global__ void __launch_bounds__(kThreads, 2) narrow_kernel(const __grid_constant__ Table table) {
#if __CUDA_ARCH__ >= 900
  extern __shared__ __align__(128) unsigned char memory[];
  const int parts = table.parts, tile = static_cast<int>(blockIdx.x) / parts,
            part = static_cast<int>(blockIdx.x) % parts;
  const Entry& e = table.entries[entry_of(table.entries, table.count, tile)];
  const int rows = tiles_along(e.m, kTileM), place = tile - e.first_tile;
  const Tile<form> work{e, place % rows * kTileM, place / rows * kTileN};
  const int steps = tiles_along(e.k, kDepth), each = tiles_along(steps, parts),
            first = min(part * each, steps), last = min(first + each, steps);
  const int columns = min(e.n - work.n0, kTileN);
  float* const sums = reinterpret_cast<float*>(memory);
  if (columns <= 16) {
    work.template sum<2>(smem_u32(memory), sums, first, last);
  } else if (columns <= 32) {
    work.template sum<4>(smem_u32(memory), sums, first, last);
  } else {
    work.template sum<8>(smem_u32(memory), sums, first, last);
  }
  if (parts > 1) {
    asm volatile("barrier.cluster.arrive.release.aligned;\nbarrier.cluster.wait.acquire.aligned;" ::
                     : "memory");
  } else {
    __syncthreads();
  }
  // Each part writes its share of the rows.
  const int share = kTileM / parts, begin = part * share;
  const u32 from = smem_u32(memory);
  if constexpr (form == NarrowForm::kGradients) {
    float* const out = static_cast<float*>(e.out);
    for (int i = threadIdx.x; i < share * columns; i += kThreads) {
      const int row = begin + (e.turned ? i % share : i / columns),
                column = e.turned ? i / share : i % columns;
      if (work.m0 + row >= e.m) continue;
      const int64_t at =
          e.turned ? static_cast<int64_t>(work.n0 + column) * e.out_stride + work.m0 + row
                   : static_cast<int64_t>(work.m0 + row) * e.out_stride + work.n0 + column;
      const float total = e.scale * joined(from, row, column, parts);
      out[at] = e.accumulates ? out[at] + total : total;
    }
  } else {
    bf16* const out = static_cast<bf16*>(e.out);
    const int runs = tiles_along(columns, 8);
    for (int i = threadIdx.x; i < share * runs; i += kThreads) {
      const int row = begin + i / runs, column = i % runs * 8;
      if (work.m0 + row >= e.m) continue;
      u32 words[4];
#pragma unroll
      for (int j = 0; j < 4; ++j)
        words[j] = pack_bf16(e.scale * joined(from, row, column + 2 * j, parts),
                             e.scale * joined(from, row, column + 2 * j + 1, parts));
      st_global16(out + static_cast<int64_t>(work.m0 + row) * e.out_stride + work.n0 + column,
                  make_uint4(words[0], words[1], words[2], words[3]));
    }
  }
  // Nobody's memory goes before all have read it.
  if (parts > 1)
    asm volatile("barrier.cluster.arrive.release.aligned;\nbarrier.cluster.wait.acquire.aligned;" ::
                     : "memory");
#endif
}

/// The work of a launch.
struct Load {
  int tiles = 0, deepest = 0;  // steps of the deepest product
};

/// CTAs along the depth of each product: as many as fill the device, and none of the deepest with
/// less than 4 steps. More of them for products of unequal depth were slower.
int parts_of(const Load& load) {
  int parts = 1;
  while (parts < kMostParts && load.tiles * parts < multiprocessors() &&
         load.deepest / (2 * parts) >= 4)
    parts *= 2;
  return parts;
}

template <NarrowForm form>
void launch(Table& table, const Load& load, cudaStream_t stream) {
  if (load.tiles == 0) return;
  table.parts = parts_of(load);
  cudaFuncSetAttribute(narrow_kernel<form>, cudaFuncAttributeMaxDynamicSharedMemorySize,
                       kSharedBytes);
  cudaLaunchAttribute size{};
  size.id = cudaLaunchAttributeClusterDimension;
  size.val.clusterDim = {static_cast<unsigned>(table.parts), 1, 1};
  cudaLaunchConfig_t config{};
  config.gridDim = dim3(static_cast<unsigned>(load.tiles * table.parts));
  config.blockDim = dim3(kThreads);
  config.dynamicSmemBytes = kSharedBytes;
  config.stream = stream;
  config.attrs = &size;
  config.numAttrs = 1;
  cudaLaunchKernelEx(&config, narrow_kernel<form>, table);
  check_launch("narrow_products");
}

void launch(NarrowForm form, Table& table, const Load& load, cudaStream_t stream) {
  switch (form) {
    case NarrowForm::kRows:
      return launch<NarrowForm::kRows>(table, load, stream);
    case NarrowForm::kDeep:
      return launch<NarrowForm::kDeep>(table, load, stream);
    case NarrowForm::kGradients:
      return launch<NarrowForm::kGradients>(table, load, stream);
  }
}

}  // namespace

void narrow_products(NarrowForm form, const std::vector<NarrowProduct>& products,
                     cudaStream_t stream) {
  Table table{};
  Load load;
  const auto run = [&] {
    launch(form, table, load, stream);
    table.count = 0;
    load = {};
  };
  for (const NarrowProduct& p : products) {
    if (p.m == 0 || p.n == 0) continue;
    if (table.count == kEntries) run();
    Entry& e = table.entries[table.count++];
    e = {static_cast<const bf16*>(p.tall),
         static_cast<const bf16*>(p.narrow),
         p.out,
         p.tall_stride,
         static_cast<int32_t>(p.narrow_stride),
         static_cast<int32_t>(p.out_stride),
         p.m,
         p.k,
         p.n,
         load.tiles,
         p.scale,
         p.turned,
         p.accumulates,
         begins_on_16_bytes(p.narrow, p.narrow_stride)};
    load.tiles += tiles_along(p.m, kTileM) * tiles_along(p.n, kTileN);
    load.deepest = std::max(load.deepest, tiles_along(p.k, kDepth));
  }
  run();
}

}  // namespace heddle::ops::cuda
