// Work of a CTA: 128 x 128 of one y, which waits in shared memory while the products are summed, 32
// in depth a step in two stages, by mma.sync. Where no y has more than 64 or 32 rows, it is 64 x
// 128 or 32 x 256 of them. A warp has 32 rows.
#include <algorithm>
#include <stdexcept>

#include "ops/cuda/mma.cuh"
#include "ops/grouped_low_rank/cuda/grouped_products.h"
#include "ops/grouped_low_rank/cuda/table.cuh"

namespace heddle::ops::cuda {
namespace {

constexpr int kDepth = 32, kThreads = 256, kStages = 2;
constexpr int kRowPitch = kDepth + 8;  // elements

template <int kTileRows, int kTileColumns>
struct Tile {
  static constexpr int kRows = kTileRows, kColumns = kTileColumns;
  static constexpr int kWidePitch = kColumns + 8;  ///< elements
  static constexpr int kWarpsOfRows = kRows / 32,
                       kWarpColumns = kColumns / (kThreads / 32 / kWarpsOfRows);
  static constexpr int kYBytes = kRows * kWidePitch * 2, kABytes = kRows * kRowPitch * 2,
                       kBBytes = kColumns * kRowPitch * 2, kStageBytes = kABytes + kBBytes;
  static_assert(kDepth * kWidePitch * 2 <= kBBytes);
  static constexpr u32 kSharedBytes = kYBytes + kStages * kStageBytes;
};

struct Term {
  const bf16 *a, *b;
  int32_t a_stride, b_stride, k;
  bool is_aligned;
};
struct Entry {
  bf16* y;
  int64_t y_stride;
  int32_t m, n, first_tile;
  int16_t first_term, terms;
};

constexpr int kEntries = 60, kTerms = 60;
struct Table {
  Entry entries[kEntries];
  Term terms[kTerms];
  int count, used;
};
static_assert(sizeof(Table) <= 4096 + 256);

__host__ __device__ inline int tiles_along(int size, int tile) { return (size + tile - 1) / tile; }

/// The place of a step among the terms of a sum.
struct Step {
  int term = 0, k0 = 0;
  __device__ __forceinline__ void advance(const Term* terms) {
    k0 += kDepth;
    if (k0 >= terms[term].k) ++term, k0 = 0;
  }
};

template <class T, bool kDepthFirst>
__device__ __forceinline__ void load(u32 stage, const Entry& e, const Term& t, int k0, int m0,
                                     int n0) {
  const u32 b = stage + T::kABytes;
  for (int i = threadIdx.x; i < T::kRows * (kDepth / 8); i += kThreads) {
    const int row = i / (kDepth / 8), column = i % (kDepth / 8) * 8;
    const bool is_in = m0 + row < e.m && k0 + column < t.k;
    cp_async16(stage + (row * kRowPitch + column) * 2,
               is_in ? t.a + static_cast<int64_t>(m0 + row) * t.a_stride + k0 + column : t.a,
               is_in);
  }
  if constexpr (!kDepthFirst) {
    for (int i = threadIdx.x; i < T::kColumns * (kDepth / 8); i += kThreads) {
      const int row = i / (kDepth / 8), column = i % (kDepth / 8) * 8;
      const bool is_own = n0 + row < e.n && k0 + column < t.k;
      copy8(b + (row * kRowPitch + column) * 2,
            is_own ? t.b + static_cast<int64_t>(n0 + row) * t.b_stride + k0 + column : t.b,
            is_own ? t.k - k0 - column : 0, t.is_aligned);
    }
  }
  if constexpr (kDepthFirst) {
    for (int i = threadIdx.x; i < kDepth * (T::kColumns / 8); i += kThreads) {
      const int row = i / (T::kColumns / 8), column = i % (T::kColumns / 8) * 8;
      const bool is_in = k0 + row < t.k && n0 + column < e.n;
      cp_async16(b + (row * T::kWidePitch + column) * 2,
                 is_in ? t.b + static_cast<int64_t>(k0 + row) * t.b_stride + n0 + column : t.b,
                 is_in);
    }
  }
}

template <class T, bool kDepthFirst>
__device__ __forceinline__ void multiply(float (&sums)[2][T::kWarpColumns / 8][4], u32 stage) {
  const int warp = threadIdx.x / 32, lane = threadIdx.x % 32, m = lane >> 3, r = lane & 7;
  const int row = warp % T::kWarpsOfRows * 32, column = warp / T::kWarpsOfRows * T::kWarpColumns;
  const u32 b = stage + T::kABytes;
#pragma unroll
  for (int k = 0; k < kDepth; k += 16) {
    u32 left[2][4];
#pragma unroll
    for (int i = 0; i < 2; ++i)
      ldmatrix4(left[i],
                stage + ((row + i * 16 + (m & 1) * 8 + r) * kRowPitch + k + (m >> 1) * 8) * 2);
#pragma unroll
    for (int n = 0; n < T::kWarpColumns / 8; n += 2) {
      u32 right[4];
      if constexpr (kDepthFirst) {
        ldmatrix4_trans(
            right, b + ((k + (m & 1) * 8 + r) * T::kWidePitch + column + n * 8 + (m >> 1) * 8) * 2);
      } else {
        ldmatrix4(right,
                  b + ((column + n * 8 + (m >> 1) * 8 + r) * kRowPitch + k + (m & 1) * 8) * 2);
      }
#pragma unroll
      for (int i = 0; i < 2; ++i) {
        mma_bf16(sums[i][n], left[i], right[0], right[1]);
        mma_bf16(sums[i][n + 1], left[i], right[2], right[3]);
      }
    }
  }
}

/// Runs f(shared address, y's place) for each 16 bytes of y in the tile.
template <class T, class F>
__device__ __forceinline__ void each_run(u32 tile, const Entry& e, int m0, int n0, const F& f) {
  for (int i = threadIdx.x; i < T::kRows * (T::kColumns / 8); i += kThreads) {
    const int row = i / (T::kColumns / 8), column = i % (T::kColumns / 8) * 8;
    if (m0 + row < e.m && n0 + column < e.n)
      f(tile + (row * T::kWidePitch + column) * 2,
        e.y + static_cast<int64_t>(m0 + row) * e.y_stride + n0 + column);
  }
}

template <class T, bool kDepthFirst>
__global__ void __launch_bounds__(kThreads, 2) wide_kernel(const __grid_constant__ Table table) {
#if __CUDA_ARCH__ >= 800
  extern __shared__ __align__(128) unsigned char memory[];
  const u32 tile = smem_u32(memory), stages = tile + T::kYBytes;
  const Entry& e =
      table.entries[entry_of(table.entries, table.count, static_cast<int>(blockIdx.x))];
  const int columns = tiles_along(e.n, T::kColumns),
            place = static_cast<int>(blockIdx.x) - e.first_tile;
  const int m0 = place / columns * T::kRows, n0 = place % columns * T::kColumns;
  const Term* const terms = table.terms + e.first_term;
  Step next, now;
  load<T, kDepthFirst>(stages, e, terms[0], 0, m0, n0);
  cp_async_commit();
  each_run<T>(tile, e, m0, n0, [](u32 to, const bf16* y) { cp_async16(to, y, true); });
  cp_async_commit();
  float sums[2][T::kWarpColumns / 8][4];
  zero(sums[0]);
  zero(sums[1]);
  next.advance(terms);
  for (int s = 0; now.term < e.terms; ++s) {
    if (s > 0) __syncthreads();  // the other stage is free
    if (next.term < e.terms) {
      load<T, kDepthFirst>(stages + (s + 1) % kStages * T::kStageBytes, e, terms[next.term],
                           next.k0, m0, n0);
      next.advance(terms);
    }
    cp_async_commit();
    // The second group of the first step is y's, which is not needed yet.
    s == 0 ? cp_async_wait<2>() : cp_async_wait<1>();
    __syncthreads();
    multiply<T, kDepthFirst>(sums, stages + s % kStages * T::kStageBytes);
    now.advance(terms);
  }
  cp_async_wait<0>();
  __syncthreads();
  const int warp = threadIdx.x / 32, lane = threadIdx.x % 32;
#pragma unroll
  for (int i = 0; i < 2; ++i) {
#pragma unroll
    for (int n = 0; n < T::kWarpColumns / 8; ++n) {
#pragma unroll
      for (int half = 0; half < 2; ++half) {
        const int row = warp % T::kWarpsOfRows * 32 + i * 16 + (lane >> 2) + half * 8,
                  column = warp / T::kWarpsOfRows * T::kWarpColumns + n * 8 + (lane & 3) * 2;
        const u32 at = tile + (row * T::kWidePitch + column) * 2, y = ld_shared4(at);
        st_shared4(at, pack_bf16(bf16_lo(y) + sums[i][n][2 * half],
                                 bf16_hi(y) + sums[i][n][2 * half + 1]));
      }
    }
  }
  __syncthreads();
  each_run<T>(tile, e, m0, n0, [](u32 from, bf16* y) { st_global16(y, ld_shared16(from)); });
#endif
}

template <class T, bool kDepthFirst>
void launch(const Table& table, int tiles, cudaStream_t stream) {
  cudaFuncSetAttribute(wide_kernel<T, kDepthFirst>, cudaFuncAttributeMaxDynamicSharedMemorySize,
                       T::kSharedBytes);
  wide_kernel<T, kDepthFirst><<<tiles, kThreads, T::kSharedBytes, stream>>>(table);
  check_launch("wide_sums");
}

/// Numbers the tiles of all sums and launches them.
template <class T>
void launch(bool b_has_depth_first, Table& table, cudaStream_t stream) {
  int tiles = 0;
  for (int i = 0; i < table.count; ++i) {
    Entry& e = table.entries[i];
    e.first_tile = tiles;
    tiles += tiles_along(e.m, T::kRows) * tiles_along(e.n, T::kColumns);
  }
  if (tiles == 0) return;
  b_has_depth_first ? launch<T, true>(table, tiles, stream)
                    : launch<T, false>(table, tiles, stream);
}

}  // namespace

void wide_sums(bool b_has_depth_first, const std::vector<WideSum>& sums, cudaStream_t stream) {
  int most_rows = 0;
  for (const WideSum& sum : sums) most_rows = std::max(most_rows, sum.m);
  Table table{};
  const auto run = [&] {
    if (most_rows <= 32) {
      launch<Tile<32, 256>>(b_has_depth_first, table, stream);
    } else if (most_rows <= 64) {
      launch<Tile<64, 128>>(b_has_depth_first, table, stream);
    } else {
      launch<Tile<128, 128>>(b_has_depth_first, table, stream);
    }
    table.count = table.used = 0;
  };
  for (const WideSum& sum : sums) {
    const int terms = static_cast<int>(sum.terms.size());
    if (sum.m == 0 || sum.n == 0 || terms == 0) continue;
    if (terms > kMostWideTerms) throw std::runtime_error("wide_sums (cuda): too many terms");
    if (table.count == kEntries || table.used + terms > kTerms) run();
    table.entries[table.count++] = {
        static_cast<bf16*>(sum.y),  sum.y_stride, sum.m, sum.n, 0, static_cast<int16_t>(table.used),
        static_cast<int16_t>(terms)};
    for (const WideTerm& t : sum.terms)
      table.terms[table.used++] = {static_cast<const bf16*>(t.a),
                                   static_cast<const bf16*>(t.b),
                                   static_cast<int32_t>(t.a_stride),
                                   static_cast<int32_t>(t.b_stride),
                                   t.k,
                                   begins_on_16_bytes(t.b, t.b_stride)};
  }
  run();
}

}  // namespace heddle::ops::cuda
