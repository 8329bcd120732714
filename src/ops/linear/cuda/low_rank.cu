// Gradients of low-rank changes: d_low = dy b and d_b = dy^T low from one read of dy, by mma.sync.
//
// Work of a CTA: 1024 rows of dy in 8 tiles of 128 x 128, over up to 16 tiles of columns. Warp w
// takes rows 16 w.. of a tile for d_low, whose sums over all its columns stay in registers, and
// columns 16 w.. for d_b, whose sums over the rows do. Both go to scratch in fp32, and a second
// launch adds the parts in their order.
//
// Shared memory: 4 stages of a tile, 32 KB each, by bulk copies with the 128-byte swizzle; low of
// all rows and b of a tile in rows of 16 bytes more than they have, which ldmatrix reads without
// conflicts: 54 KB up to rank 16, 90 up to 32.
#include <cuda.h>

#include <algorithm>
#include <limits>
#include <stdexcept>

#include "ops/cuda/mma.cuh"
#include "ops/cuda/tensor_map.h"
#include "ops/cuda/vector.cuh"
#include "ops/linear/cuda/low_rank.h"

namespace heddle::ops::cuda {
namespace {

constexpr int kTile = 128, kRowTiles = 8, kStripe = kRowTiles * kTile, kStages = 4;
constexpr int kThreads = 256;
constexpr u32 kTileBytes = kTile * kTile * 2;

/// Form of a kernel for ranks up to kRank.
template <int Rank>
struct Form {
  static constexpr int kRank = Rank;
  static constexpr int kPitch = Rank * 2 + 16;  // bytes
  static constexpr u32 kSharedBytes =
      kStages * kTileBytes + (kStripe + kTile) * kPitch + kStages * 8 + 1024;
};

struct Args {
  CUtensorMap dy[kMostLowRankGradients];
  LowRankGradient gradients[kMostLowRankGradients];
  int first_unit[kMostLowRankGradients];  // a unit: `width` tiles of columns of one gradient
  float* d_low[kMostLowRankGradients];    // [units, padded rows, kRank]
  float* d_b[kMostLowRankGradients];      // [stripes, padded columns, kRank]
  int count, width, stripes, rank;
  int64_t rows;
};

__host__ __device__ inline int tiles_of(int64_t columns) {
  return static_cast<int>((columns + kTile - 1) / kTile);
}

#if __CUDA_ARCH__ >= 900

/// Rows [first, first + count) of a [limit, rank] matrix; zeros beyond it.
template <class Form>
__device__ __forceinline__ void load_narrow(u32 to, const void* from, int64_t stride, int64_t first,
                                            int64_t limit, int count, int rank) {
  constexpr int kRuns = Form::kRank / 8;
  for (int i = threadIdx.x; i < kRuns * count; i += kThreads) {
    const int row = i / kRuns, column = i % kRuns * 8;
    uint4 v = make_uint4(0, 0, 0, 0);
    if (first + row < limit && column < rank)
      v = *reinterpret_cast<const uint4*>(static_cast<const bf16*>(from) + (first + row) * stride +
                                          column);
    asm volatile(
        "st.shared.v4.u32 [%0], {%1, %2, %3, %4};" ::"r"(to + row * Form::kPitch + column * 2),
        "r"(v.x), "r"(v.y), "r"(v.z), "r"(v.w)
        : "memory");
  }
}

/// 16 rows of a narrow matrix as the right operand of a product over them.
template <class Form>
struct Narrow {
  static constexpr int kPairs = Form::kRank / 16;
  u32 f[kPairs][4];

  __device__ __forceinline__ Narrow(u32 matrix, int row, int lane) {
    const int m = lane >> 3, r = lane & 7;
    const u32 at = matrix + (row + (m & 1) * 8 + r) * Form::kPitch + (m >> 1) * 16;
#pragma unroll
    for (int i = 0; i < kPairs; ++i) ldmatrix4_trans(f[i], at + i * 32);
  }
  Narrow() = default;
};

/// 16 rows of sums.
template <class Form>
struct Sums {
  float v[Form::kRank / 8][4];

  __device__ __forceinline__ void add(const u32 (&left)[4], const Narrow<Form>& right) {
#pragma unroll
    for (int i = 0; i < Narrow<Form>::kPairs; ++i) {
      mma_bf16(v[2 * i], left, right.f[i][0], right.f[i][1]);
      mma_bf16(v[2 * i + 1], left, right.f[i][2], right.f[i][3]);
    }
  }
  __device__ __forceinline__ void store(float* to, int lane) const {
    const int row = lane >> 2, column = (lane & 3) * 2;
#pragma unroll
    for (int n = 0; n < Form::kRank / 8; ++n) {
      *reinterpret_cast<float2*>(to + row * Form::kRank + n * 8 + column) =
          make_float2(v[n][0], v[n][1]);
      *reinterpret_cast<float2*>(to + (row + 8) * Form::kRank + n * 8 + column) =
          make_float2(v[n][2], v[n][3]);
    }
  }
};

#endif

template <class Form>
__global__ void __launch_bounds__(kThreads, 1) parts_kernel(const __grid_constant__ Args a) {
#if __CUDA_ARCH__ >= 900
  constexpr int kRank = Form::kRank;
  constexpr bool kHolds = kRank <= 16;  // b of a tile in registers
  extern __shared__ unsigned char memory[];
  const u32 stages = (smem_u32(memory) + 1023) & ~1023u;
  const u32 low = stages + kStages * kTileBytes, b = low + kStripe * Form::kPitch;
  const u32 full = b + kTile * Form::kPitch;
  const int stripe = blockIdx.x % a.stripes, unit = blockIdx.x / a.stripes;
  int g = 0;
  while (g + 1 < a.count && unit >= a.first_unit[g + 1]) ++g;
  const LowRankGradient& gradient = a.gradients[g];
  const int first_tile = (unit - a.first_unit[g]) * a.width;
  const int tiles = min(a.width, tiles_of(gradient.columns) - first_tile) * kRowTiles;
  const int warp = threadIdx.x / 32, lane = threadIdx.x % 32, m = lane >> 3, r = lane & 7;

  const auto load_tile = [&](int i) {
    const u32 to = stages + (i % kStages) * kTileBytes, bar = full + (i % kStages) * 8;
    const int row = stripe * kStripe + (i % kRowTiles) * kTile;
    const int column = (first_tile + i / kRowTiles) * kTile;
    mbar_expect(bar, kTileBytes);
    bulk_load_box(to, &a.dy[g], column, row, bar);
    bulk_load_box(to + kTileBytes / 2, &a.dy[g], column + 64, row, bar);
  };
  if (threadIdx.x == 0) {
    for (int s = 0; s < kStages; ++s) mbar_init(full + s * 8, 1);
    asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory");
    for (int i = 0; i < min(kStages, tiles); ++i) load_tile(i);
  }
  load_narrow<Form>(low, gradient.low, gradient.low_stride, int64_t{stripe} * kStripe, a.rows,
                    kStripe, a.rank);

  Sums<Form> d_low[kRowTiles];
#pragma unroll
  for (int t = 0; t < kRowTiles; ++t) zero(d_low[t].v);
  for (int first = 0; first < tiles; first += kRowTiles) {
    const int64_t column = int64_t{first_tile + first / kRowTiles} * kTile;
    load_narrow<Form>(b, gradient.b, gradient.b_stride, column, gradient.columns, kTile, a.rank);
    __syncthreads();
    Narrow<Form> held[kHolds ? 8 : 1];
    if constexpr (kHolds) {
#pragma unroll
      for (int k = 0; k < 8; ++k) held[k] = Narrow<Form>(b, k * 16, lane);
    }
    Sums<Form> d_b;
    zero(d_b.v);
#pragma unroll
    for (int t = 0; t < kRowTiles; ++t) {
      const int i = first + t;
      const u32 tile = stages + (i % kStages) * kTileBytes;
      mbar_wait(full + (i % kStages) * 8, (i / kStages) & 1);
#pragma unroll(kHolds ? 8 : 2)
      for (int k = 0; k < 8; ++k) {
        u32 left[4];
        ldmatrix4(left,
                  tile_address(tile, kTile, warp * 16 + (m & 1) * 8 + r, k * 16 + (m >> 1) * 8));
        if constexpr (kHolds) {
          d_low[t].add(left, held[k]);
        } else {
          d_low[t].add(left, Narrow<Form>(b, k * 16, lane));
        }
        load_fragment_trans(left, tile, kTile, k * 16, warp * 16, lane);
        d_b.add(left, Narrow<Form>(low, t * kTile + k * 16, lane));
      }
      __syncthreads();
      if (threadIdx.x == 0 && i + kStages < tiles) load_tile(i + kStages);
    }
    const int64_t padded = int64_t{tiles_of(gradient.columns)} * kTile;
    d_b.store(a.d_b[g] + (stripe * padded + column + warp * 16) * kRank, lane);
  }
  const int64_t padded = int64_t{a.stripes} * kStripe;
  float* const part = a.d_low[g] + ((unit - a.first_unit[g]) * padded + stripe * kStripe) * kRank;
#pragma unroll
  for (int t = 0; t < kRowTiles; ++t) d_low[t].store(part + (t * kTile + warp * 16) * kRank, lane);
#endif
}

/// Four columns of a sum over `parts` matrices of `padded` rows.
template <class Form>
__device__ __forceinline__ void sum_parts(const float* from, int parts, int64_t padded, int64_t row,
                                          int column, float (&total)[4]) {
#pragma unroll
  for (int k = 0; k < 4; ++k) total[k] = 0;
  for (int p = 0; p < parts; ++p) {
    float x[4];
    read(from + (p * padded + row) * Form::kRank + column, x);
#pragma unroll
    for (int k = 0; k < 4; ++k) total[k] += x[k];
  }
}

/// Reduces gradient y / 2: d_low for even y, d_b for odd. A thread makes four columns of a row.
template <class Form>
__global__ void __launch_bounds__(kThreads) join_kernel(const __grid_constant__ Args a) {
  const int g = blockIdx.y / 2;
  const LowRankGradient& gradient = a.gradients[g];
  const int64_t i = int64_t{blockIdx.x} * kThreads + threadIdx.x;
  constexpr int kRuns = Form::kRank / 4;
  const int64_t row = i / kRuns;
  const int column = static_cast<int>(i % kRuns) * 4;
  if (column >= a.rank) return;
  const int tiles = tiles_of(gradient.columns);
  float total[4];
  if (blockIdx.y % 2 == 0) {
    if (row >= a.rows) return;
    sum_parts<Form>(a.d_low[g], (tiles + a.width - 1) / a.width, int64_t{a.stripes} * kStripe, row,
                    column, total);
    write(static_cast<bf16*>(gradient.d_low) + row * gradient.d_low_stride + column, total);
    return;
  }
  if (row >= gradient.columns) return;
  sum_parts<Form>(a.d_b[g], a.stripes, int64_t{tiles} * kTile, row, column, total);
  write(gradient.d_b + row * a.rank + column, total);
}

/// How the work is divided. Wide units save scratch, which costs each of them as much as half a
/// tile; narrow ones leave fewer multiprocessors without work in the last round.
struct Plan {
  int stripes, width;

  int units(const LowRankGradient& g) const { return (tiles_of(g.columns) + width - 1) / width; }
};

Plan plan_of(int64_t rows, const std::vector<LowRankGradient>& gradients) {
  constexpr int kWidest = 16;
  const int stripes = static_cast<int>((rows + kStripe - 1) / kStripe), places = multiprocessors();
  Plan best{stripes, 1};
  int64_t least = std::numeric_limits<int64_t>::max();
  for (int width = 1; width <= kWidest; ++width) {
    const Plan plan{stripes, width};
    int64_t units = 0;
    for (const LowRankGradient& g : gradients) units += plan.units(g);
    const int64_t rounds = (units * stripes + places - 1) / places, cost = rounds * (2 * width + 1);
    if (cost >= least) continue;
    least = cost;
    best = plan;
  }
  return best;
}

template <class Form>
int64_t low_floats(const Plan& plan, const LowRankGradient& g) {
  return int64_t{plan.units(g)} * plan.stripes * kStripe * Form::kRank;
}

template <class Form>
int64_t b_floats(const Plan& plan, const LowRankGradient& g) {
  return int64_t{plan.stripes} * tiles_of(g.columns) * kTile * Form::kRank;
}

template <class Form>
void run(int64_t rows, int64_t rank, const std::vector<LowRankGradient>& gradients,
         float* workspace, cudaStream_t stream) {
  const Plan plan = plan_of(rows, gradients);
  Args args{};
  args.count = static_cast<int>(gradients.size());
  args.width = plan.width;
  args.stripes = plan.stripes;
  args.rank = static_cast<int>(rank);
  args.rows = rows;
  int units = 0;
  int64_t longest = rows;
  for (int i = 0; i < args.count; ++i) {
    const LowRankGradient& g = gradients[i];
    args.gradients[i] = g;
    args.dy[i] = tensor_map(g.dy, rows, g.columns, g.dy_stride, kTile);
    args.first_unit[i] = units;
    units += plan.units(g);
    args.d_low[i] = workspace;
    args.d_b[i] = workspace + low_floats<Form>(plan, g);
    workspace = args.d_b[i] + b_floats<Form>(plan, g);
    longest = std::max(longest, g.columns);
  }
  cudaFuncSetAttribute(parts_kernel<Form>, cudaFuncAttributeMaxDynamicSharedMemorySize,
                       Form::kSharedBytes);
  parts_kernel<Form><<<units * plan.stripes, kThreads, Form::kSharedBytes, stream>>>(args);
  const dim3 blocks(static_cast<unsigned>((longest * (Form::kRank / 4) + kThreads - 1) / kThreads),
                    static_cast<unsigned>(2 * args.count));
  join_kernel<Form><<<blocks, kThreads, 0, stream>>>(args);
  check_launch("low_rank_gradients");
}

/// Calls f with the form for the rank.
template <class F>
auto with_form(int64_t rank, const F& f) {
  return rank <= 16 ? f(Form<16>()) : f(Form<32>());
}

}  // namespace

int64_t low_rank_workspace(int64_t rows, int64_t rank,
                           const std::vector<LowRankGradient>& gradients) {
  return with_form(rank, [&]<class Form>(Form) {
    const Plan plan = plan_of(rows, gradients);
    int64_t floats = 0;
    for (const LowRankGradient& g : gradients)
      floats += low_floats<Form>(plan, g) + b_floats<Form>(plan, g);
    return floats;
  });
}

void low_rank_gradients(int64_t rows, int64_t rank, const std::vector<LowRankGradient>& gradients,
                        float* workspace, cudaStream_t stream) {
  if (rows == 0 || gradients.empty()) return;
  if (gradients.size() > kMostLowRankGradients || rank % 8 != 0 || rank < 8 || rank > kMostLowRank)
    throw std::runtime_error(
        "low_rank_gradients (cuda): too many gradients, or a rank that is no multiple of 8 up to "
        "32");
  with_form(rank, [&]<class Form>(Form) { run<Form>(rows, rank, gradients, workspace, stream); });
}

}  // namespace heddle::ops::cuda
