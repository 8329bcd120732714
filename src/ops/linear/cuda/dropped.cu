// All three kernels draw the elements again where they need them; nothing but x, what is added to
// and the small matrices is read or written. Random bits cost more than the products: 64 of them
// serve four elements, and a thread always has eight consecutive columns of a row, so that it draws
// each once. The order of the depth and of the columns within a product's tile is free, and is
// chosen so that these eight are what the tile's fragments want of a thread.
//
//   low        CTA: 32 rows; warp: every eighth run of 32 columns; their sums join at the end, one
//              warp's after the other's
//   gradient   CTA: 64 columns and a share of the rows, in tiles of 64: x as each factor sees it
//              goes to shared memory (8 KB a factor), turned on the way to the fragments; the
//              shares' sums join in a second launch
//   add        warp: 128 rows by 32 columns, fragments of a in registers
#include "ops/linear/cuda/dropped.h"

#include <algorithm>
#include <stdexcept>
#include <type_traits>

#include "base/splitmix.h"
#include "ops/cuda/column_sum.h"
#include "ops/cuda/mma.cuh"
#include "ops/cuda/ptx.cuh"
#include "ops/cuda/vector.cuh"

namespace heddle::ops::cuda {
namespace {

struct Arguments {
  DroppedShape shape;
  const bf16 *x, *a;
  bf16* dx;
  bf16* low;
  float* partial;
  int64_t x_stride, a_stride, low_stride;
  int64_t rows_of_share;  // gradient
};

/// Start of the random bits of eight columns; features of a run are consecutive.
__device__ __forceinline__ u64 by_features(const DroppedShape& s, int64_t column) {
  return (static_cast<u64>(s.features[column]) / 4 + 1) * splitmix::kStride;
}
__device__ __forceinline__ u64 by_token(const DroppedShape& s, int64_t row) {
  return row < s.rows ? static_cast<u64>(s.draws[row]) : 0;
}

/// 1 in each half of `bits` that is no less than the threshold, whose pair less one is given; the
/// halves do not meet.
__device__ __forceinline__ u32 kept_halves(u32 bits, u32 below) {
  return __vminu2(__vmaxu2(bits, below) - below, 0x00010001u);
}

/// Bits of eight consecutive columns: 1 in the halves of those that are kept.
struct Kept {
  u32 pairs[4];

  __device__ __forceinline__ Kept(u64 seed, u32 below) {
#pragma unroll
    for (int i = 0; i < 2; ++i) {
      const u64 bits = splitmix::mixed(seed + i * splitmix::kStride);
      pairs[2 * i] = kept_halves(static_cast<u32>(bits), below);
      pairs[2 * i + 1] = kept_halves(static_cast<u32>(bits >> 32), below);
    }
  }
  __device__ __forceinline__ uint4 of(const uint4& x) const {
    return make_uint4(x.x & pairs[0] * 0xffffu, x.y & pairs[1] * 0xffffu, x.z & pairs[2] * 0xffffu,
                      x.w & pairs[3] * 0xffffu);
  }
};

__device__ __forceinline__ u32 below_of(const DroppedShape& s) {
  return (s.threshold - 1) * 0x00010001u;
}

__device__ __forceinline__ uint4 load_row(const bf16* data, int64_t stride, int64_t row,
                                          int64_t rows, int64_t column) {
  return row < rows ? *reinterpret_cast<const uint4*>(data + row * stride + column)
                    : make_uint4(0, 0, 0, 0);
}

constexpr int kLowThreads = 256, kLowRows = 32, kLowSplits = kLowThreads / 32;

template <int F, int R8>
__global__ void __launch_bounds__(kLowThreads, 2) low_kernel(const __grid_constant__ Arguments p) {
  constexpr int kRanks = F * R8 * 8;
  __shared__ float sums[kLowRows][kRanks];
  const DroppedShape& s = p.shape;
  const int split = threadIdx.x / 32, lane = threadIdx.x % 32, g = lane / 4, c = lane % 4;
  const u32 below = below_of(s);
  int64_t row[4];
  u64 token[4];
#pragma unroll
  for (int i = 0; i < 4; ++i) {
    row[i] = blockIdx.x * int64_t{kLowRows} + 8 * i + g;
    token[i] = by_token(s, row[i]);
  }
  float d[2][F * R8][4] = {};
  for (int64_t column = split * 32 + 8 * c; column < s.width; column += kLowSplits * 32) {
    uint4 x[4];
#pragma unroll
    for (int i = 0; i < 4; ++i) x[i] = load_row(p.x, p.x_stride, row[i], s.rows, column);
    const u64 feature = by_features(s, column);
#pragma unroll
    for (int f = 0; f < F; ++f) {
      uint4 b[R8];
#pragma unroll
      for (int n = 0; n < R8; ++n) {
        b[n] = *reinterpret_cast<const uint4*>(p.a + ((f * R8 + n) * 8 + g) * p.a_stride + column);
      }
#pragma unroll
      for (int m = 0; m < 2; ++m) {
        const uint4 top = Kept(token[2 * m] + s.keys[f] + feature, below).of(x[2 * m]);
        const uint4 bottom = Kept(token[2 * m + 1] + s.keys[f] + feature, below).of(x[2 * m + 1]);
#pragma unroll
        for (int n = 0; n < R8; ++n) {
          mma_bf16(d[m][f * R8 + n], {top.x, bottom.x, top.y, bottom.y}, b[n].x, b[n].y);
          mma_bf16(d[m][f * R8 + n], {top.z, bottom.z, top.w, bottom.w}, b[n].z, b[n].w);
        }
      }
    }
  }
  for (int turn = 0; turn < kLowSplits; ++turn) {
    if (turn == split) {
#pragma unroll
      for (int m = 0; m < 2; ++m) {
#pragma unroll
        for (int n = 0; n < F * R8; ++n) {
#pragma unroll
          for (int i = 0; i < 4; ++i) {
            float& sum = sums[16 * m + 8 * (i / 2) + g][8 * n + 2 * c + i % 2];
            sum = turn == 0 ? d[m][n][i] : sum + d[m][n][i];
          }
        }
      }
    }
    __syncthreads();
  }
  for (int i = threadIdx.x; i < kLowRows * kRanks / 2; i += kLowThreads) {
    const int at = 2 * i % kRanks, local = 2 * i / kRanks;
    const int64_t to = blockIdx.x * int64_t{kLowRows} + local;
    if (to >= s.rows) continue;
    const u32 pair = pack_bf16(s.kept * sums[local][at], s.kept * sums[local][at + 1]);
    *reinterpret_cast<u32*>(p.low + to * p.low_stride + at) = pair;
  }
}

constexpr int kGradientThreads = 128, kTile = 64;

template <int F, int R8>
__global__ void __launch_bounds__(kGradientThreads)
    gradient_kernel(const __grid_constant__ Arguments p) {
  constexpr int kTiles = F * R8, kRanks = kTiles * 8;
  __shared__ __align__(128) bf16 seen[F][kTile * kTile];
  __shared__ __align__(128) bf16 low[kTile * kTile];  // kRanks columns of it
  const DroppedShape& s = p.shape;
  const int thread = threadIdx.x, warp = thread / 32, lane = thread % 32;
  const int piece = thread % 8 * 8, local = thread / 8;  // of x: columns, and rows by 16
  const int64_t column = blockIdx.x * int64_t{kTile};
  const int64_t begin = blockIdx.y * p.rows_of_share, end = min(begin + p.rows_of_share, s.rows);
  const u32 below = below_of(s);
  const u64 feature = by_features(s, column + piece);
  float d[kTiles][4] = {};
  uint4 x[4];
  const auto fetch = [&](int64_t from) {
#pragma unroll
    for (int i = 0; i < 4; ++i)
      x[i] = load_row(p.x, p.x_stride, from + local + 16 * i, end, column + piece);
  };
  fetch(begin);
  for (int64_t from = begin; from < end; from += kTile) {
    __syncthreads();  // the tiles before are read
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      const int row = local + 16 * i;
      const u64 token = by_token(s, from + row);
#pragma unroll
      for (int f = 0; f < F; ++f) {
        *reinterpret_cast<uint4*>(reinterpret_cast<char*>(seen[f]) +
                                  tile_address(0, kTile, row, piece)) =
            Kept(token + s.keys[f] + feature, below).of(x[i]);
      }
    }
    for (int i = thread; i < kTile * kTiles; i += kGradientThreads) {
      const int row = i / kTiles, at = i % kTiles * 8;
      *reinterpret_cast<uint4*>(reinterpret_cast<char*>(low) + tile_address(0, kTile, row, at)) =
          load_row(p.low, p.low_stride, from + row, end, at);
    }
    __syncthreads();
    fetch(from + kTile);
#pragma unroll
    for (int k = 0; k < kTile / 16; ++k) {
      u32 b[(kTiles + 1) / 2][4];
#pragma unroll
      for (int n = 0; n < (kTiles + 1) / 2; ++n) {
        // Turned: tokens 0-7 and 8-15 of ranks 0-7, then of ranks 8-15.
        ldmatrix4_trans(b[n], tile_address(smem_u32(low), kTile, 16 * k + (lane & 8) + (lane & 7),
                                           16 * n + (lane >> 4) * 8));
      }
#pragma unroll
      for (int f = 0; f < F; ++f) {
        u32 a[4];
        load_fragment_trans(a, smem_u32(seen[f]), kTile, 16 * k, 16 * warp, lane);
#pragma unroll
        for (int n = f * R8; n < (f + 1) * R8; ++n)
          mma_bf16(d[n], a, b[n / 2][n % 2 * 2], b[n / 2][n % 2 * 2 + 1]);
      }
    }
  }
  float* partial = p.partial + blockIdx.y * int64_t{kRanks} * s.width;
#pragma unroll
  for (int n = 0; n < kTiles; ++n) {
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      const int64_t rank = 8 * n + 2 * (lane % 4) + i % 2,
                    to = column + 16 * warp + 8 * (i / 2) + lane / 4;
      partial[rank * s.width + to] = s.kept * d[n][i];
    }
  }
}

constexpr int kAddThreads = 128, kAddRows = 128, kAddColumns = 32;

template <int F, int R8>
__global__ void __launch_bounds__(kAddThreads) add_kernel(const __grid_constant__ Arguments p) {
  constexpr int kSteps = (R8 + 1) / 2;  // of 16 ranks; of rank 8 the other half is zero
  const DroppedShape& s = p.shape;
  const int warp = threadIdx.x / 32, lane = threadIdx.x % 32, g = lane / 4, c = lane % 4;
  const int64_t column = (blockIdx.y * int64_t{kAddThreads / 32} + warp) * kAddColumns;
  if (column >= s.width) return;
  const int64_t own = column + 8 * c;
  const u32 below = below_of(s);
  const u64 feature = by_features(s, own);
  // Column g of tile j is 8 (g / 2) + 2 j + g % 2 of the 32: a thread's results are 8 in a row.
  u32 b[F][kSteps][4][2];
#pragma unroll
  for (int j = 0; j < 4; ++j) {
    const bf16* from = p.a + (column + 8 * (g / 2) + 2 * j + g % 2) * p.a_stride + 2 * c;
#pragma unroll
    for (int f = 0; f < F; ++f) {
#pragma unroll
      for (int k = 0; k < kSteps; ++k) {
        const bf16* at = from + f * R8 * 8 + 16 * k;
        b[f][k][j][0] = *reinterpret_cast<const u32*>(at);
        b[f][k][j][1] = 2 * k + 1 < R8 ? *reinterpret_cast<const u32*>(at + 8) : 0;
      }
    }
  }
  const int64_t first = blockIdx.x * int64_t{kAddRows}, end = min(first + kAddRows, s.rows);
  uint4 next[2];
  const auto fetch = [&](int64_t from) {
#pragma unroll
    for (int i = 0; i < 2; ++i) next[i] = load_row(p.dx, p.x_stride, from + 8 * i + g, end, own);
  };
  fetch(first);
  for (int64_t from = first; from < end; from += 16) {
    const uint4 old[2] = {next[0], next[1]};
    fetch(from + 16);
    float sum[2][8];
#pragma unroll
    for (int i = 0; i < 2; ++i) {
      const u32 words[4] = {old[i].x, old[i].y, old[i].z, old[i].w};
#pragma unroll
      for (int j = 0; j < 4; ++j) {
        sum[i][2 * j] = bf16_lo(words[j]);
        sum[i][2 * j + 1] = bf16_hi(words[j]);
      }
    }
    const u64 token[2] = {by_token(s, from + g), by_token(s, from + 8 + g)};
#pragma unroll
    for (int f = 0; f < F; ++f) {
      float d[4][4] = {};
#pragma unroll
      for (int k = 0; k < kSteps; ++k) {
        u32 a[4];
#pragma unroll
        for (int i = 0; i < 4; ++i) {
          const int64_t row = from + 8 * (i % 2) + g;
          const bool is_there = row < end && 2 * k + i / 2 < R8;
          const bf16* at = p.low + row * p.low_stride + f * R8 * 8 + 16 * k + 8 * (i / 2) + 2 * c;
          a[i] = is_there ? *reinterpret_cast<const u32*>(at) : 0;
        }
#pragma unroll
        for (int j = 0; j < 4; ++j) mma_bf16(d[j], a, b[f][k][j][0], b[f][k][j][1]);
      }
#pragma unroll
      for (int i = 0; i < 2; ++i) {
        const Kept kept(token[i] + s.keys[f] + feature, below);
#pragma unroll
        for (int j = 0; j < 4; ++j) {
          if ((kept.pairs[j] & 0xffffu) != 0) sum[i][2 * j] += s.kept * d[j][2 * i];
          if (kept.pairs[j] >> 16 != 0) sum[i][2 * j + 1] += s.kept * d[j][2 * i + 1];
        }
      }
    }
#pragma unroll
    for (int i = 0; i < 2; ++i) {
      const int64_t row = from + 8 * i + g;
      if (row >= end) continue;
      const float(&v)[8] = sum[i];
      st_global16(p.dx + row * p.x_stride + own,
                  make_uint4(pack_bf16(v[0], v[1]), pack_bf16(v[2], v[3]), pack_bf16(v[4], v[5]),
                             pack_bf16(v[6], v[7])));
    }
  }
}

template <int V>
using Constant = std::integral_constant<int, V>;

/// Calls f(factors, rank / 8) with both as constants.
template <class F>
void dispatch(const DroppedShape& s, const F& f) {
  const auto with_rank = [&](auto factors) {
    constexpr int kFactors = decltype(factors)::value;
    const bool ran = [&] {
      switch (s.rank) {
        case 8:
          return f(factors, Constant<1>()), true;
        case 16:
          return f(factors, Constant<2>()), true;
        case 32:
          if constexpr (kFactors <= 2) return f(factors, Constant<4>()), true;
          return false;
        case 64:
          if constexpr (kFactors == 1) return f(factors, Constant<8>()), true;
          return false;
        default:
          return false;
      }
    }();
    if (!ran) throw std::invalid_argument("dropped: no kernel of this rank and number of factors");
  };
  if (s.width % kDroppedColumns != 0 || s.threshold == 0)
    throw std::invalid_argument("dropped: the width must be a multiple of 64, the threshold not 0");
  switch (s.factors) {
    case 1:
      return with_rank(Constant<1>());
    case 2:
      return with_rank(Constant<2>());
    case 3:
      return with_rank(Constant<3>());
    case 4:
      return with_rank(Constant<4>());
    default:
      throw std::invalid_argument("dropped: 1 to 4 factors");
  }
}

/// CTAs that divide the rows of each 64 columns: of all as many as fit the device at once.
int64_t shares_of(const DroppedShape& s) {
  const int64_t tiles = (s.rows + kTile - 1) / kTile, blocks = s.width / kTile;
  const int64_t at_once = multiprocessors() * int64_t{s.factors == 1 ? 8 : 5};
  return std::clamp<int64_t>(at_once / blocks, 1, std::max<int64_t>(1, tiles));
}

unsigned blocks_for(int64_t n, int64_t each) {
  return static_cast<unsigned>((n + each - 1) / each);
}

}  // namespace

void dropped_low(const DroppedShape& shape, const void* x, int64_t x_stride, const void* a,
                 int64_t a_stride, void* low, int64_t low_stride, cudaStream_t stream) {
  if (shape.rows == 0) return;
  Arguments p{};
  p.shape = shape;
  p.x = static_cast<const bf16*>(x);
  p.a = static_cast<const bf16*>(a);
  p.low = static_cast<bf16*>(low);
  p.x_stride = x_stride, p.a_stride = a_stride, p.low_stride = low_stride;
  dispatch(shape, [&](auto factors, auto r8) {
    low_kernel<decltype(factors)::value, decltype(r8)::value>
        <<<blocks_for(shape.rows, kLowRows), kLowThreads, 0, stream>>>(p);
  });
  check_launch("dropped_low");
}

int64_t dropped_gradient_workspace(const DroppedShape& shape) {
  return shares_of(shape) * shape.factors * shape.rank * shape.width;
}

void dropped_gradient(const DroppedShape& shape, const void* x, int64_t x_stride, const void* low,
                      int64_t low_stride, float* d_a, float* workspace, cudaStream_t stream) {
  const int64_t shares = shares_of(shape);
  Arguments p{};
  p.shape = shape;
  p.x = static_cast<const bf16*>(x);
  p.low = static_cast<bf16*>(const_cast<void*>(low));
  p.partial = workspace;
  p.x_stride = x_stride, p.low_stride = low_stride;
  p.rows_of_share = ((shape.rows + kTile - 1) / kTile + shares - 1) / shares * kTile;
  const dim3 blocks(static_cast<unsigned>(shape.width / kTile), static_cast<unsigned>(shares));
  dispatch(shape, [&](auto factors, auto r8) {
    gradient_kernel<decltype(factors)::value, decltype(r8)::value>
        <<<blocks, kGradientThreads, 0, stream>>>(p);
  });
  check_launch("dropped_gradient");
  column_sum(workspace, shares, shape.factors * shape.rank * shape.width, d_a, Element::kFloat32,
             stream);
}

void add_dropped(const DroppedShape& shape, void* dx, int64_t dx_stride, const void* low,
                 int64_t low_stride, const void* a_turned, int64_t a_stride, cudaStream_t stream) {
  if (shape.rows == 0) return;
  Arguments p{};
  p.shape = shape;
  p.dx = static_cast<bf16*>(dx);
  p.low = static_cast<bf16*>(const_cast<void*>(low));
  p.a = static_cast<const bf16*>(a_turned);
  p.x_stride = dx_stride, p.low_stride = low_stride, p.a_stride = a_stride;
  const dim3 blocks(blocks_for(shape.rows, kAddRows),
                    blocks_for(shape.width, kAddThreads / 32 * kAddColumns));
  dispatch(shape, [&](auto factors, auto r8) {
    add_kernel<decltype(factors)::value, decltype(r8)::value>
        <<<blocks, kAddThreads, 0, stream>>>(p);
  });
  check_launch("add_dropped");
}

}  // namespace heddle::ops::cuda
