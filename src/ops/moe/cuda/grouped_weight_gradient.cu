// One product for each expert, whose depth is the expert's rows: dw = dy^T x.
//
// Work: persistent clusters of two CTAs; a cluster takes tiles of 256 x 256 of an expert's matrix,
// each CTA 128 of its rows. Both need the same columns of x: each loads half of a stage's and sends
// it to both. Clusters take tiles by turns, those of the experts with the most rows first, every
// other round backwards. An expert without rows has tiles of zeros. Warps 0 and 1 load, dy and x;
// warpgroups 1 and 2 multiply 64 x 256 each, 128 accumulators a thread.
//
// Both operands lie in shared memory as they lie in memory, with the depth along the rows of a
// tile; wgmma takes that order for bf16. The last stage of an expert holds 16 or 32 rows; those
// beyond the expert's, of the next one or of nobody, are set to zeros there. Zeros in one operand
// alone are not enough: the other one's rows may hold infinities.
//
// Shared memory: 8 stages of 32 rows, dy 8 KB + x 16 KB each; two tiles of 64 x 64 a multiplying
// warpgroup on the way out, 32 KB; barriers; the order of experts, 1 KB. All tiles have the
// 128-byte swizzle.
//
// full[s]: the bytes of a stage have landed here. empty[s]: the 16 multiplying warps of both CTAs
// are done with it; all loaders wait for it, because those of x write into both CTAs.
#include <stdexcept>
#include <string>

#include "ops/cuda/cta_pair.cuh"
#include "ops/cuda/mma.cuh"
#include "ops/cuda/tensor_map.h"
#include "ops/moe/cuda/grouped_product.h"
#include "ops/moe/cuda/grouped_weight_gradient.h"
#include "ops/moe/cuda/token_tiles.cuh"

namespace heddle::ops::cuda {
namespace {

/// kOut x kIn: the tile of a CTA. kSteps: of 16 rows, in a stage.
constexpr int kOut = 128, kIn = 256, kDepth = 32, kSteps = kDepth / 16, kStages = 8;
constexpr int kThreads = 384;
/// Bytes of 64 columns of a stage.
constexpr u32 kColumnBytes = kDepth * 128;
constexpr u32 kBytesDy = kOut / 64 * kColumnBytes, kStageBytes = kBytesDy + kIn / 64 * kColumnBytes;
constexpr u32 kOutBytes = 64 * 64 * 2;
constexpr u32 kSharedBytes =
    kStages * kStageBytes + 4 * kOutBytes + 2 * kStages * 8 + kMostExperts * sizeof(uint16_t);
static_assert(kSharedBytes <= 227 * 1024);

struct Args {
  CUtensorMap dy[kSteps], x[kSteps];  ///< Boxes of 16 and 32 rows.
  CUtensorMap dw;
  const int32_t* ends;
  int experts, out, in;
  int tiles, columns;  ///< Tiles of a cluster: in a matrix, and side by side.
};

#if defined(__CUDA_ARCH_FEAT_SM90_ALL)

/// A tile: its expert's rows, and where in the expert's matrix it lies.
struct Tile {
  int expert, row, rows, out, in;
};

/// The next tile of a cluster, for the CTA that is `rank` in it.
struct Upcoming {
  const Args& a;
  const uint16_t* order;  ///< Experts, those with the most rows first.
  int rank, round = 0;
  bool is_any = false;
  Tile tile = {};

  __device__ __forceinline__ void look() {
    const int clusters = static_cast<int>(gridDim.x / 2), own = static_cast<int>(blockIdx.x / 2);
    const int begun = round * clusters, many = min(clusters, a.experts * a.tiles - begun);
    is_any = own < many;
    if (!is_any) return;
    const int item = begun + (round % 2 == 0 ? own : many - 1 - own);
    ++round;
    const int expert = order[item / a.tiles], index = item % a.tiles;
    const int begin = expert == 0 ? 0 : a.ends[expert - 1];
    tile = {expert, begin, a.ends[expert] - begin, (index / a.columns * 2 + rank) * kOut,
            index % a.columns * kIn};
  }
};

struct Ring {
  int stage = 0, phase = 0;
  __device__ __forceinline__ void next() {
    if (++stage == kStages) {
      stage = 0;
      phase ^= 1;
    }
  }
};

/// Loads x, half of it, to both CTAs, or dy.
template <bool kIsX>
__device__ void load(const Args& a, const uint16_t* order, u32 stages, u32 full, u32 empty,
                     int rank) {
  Ring ring;
  Upcoming upcoming{a, order, rank};
  for (upcoming.look(); upcoming.is_any; upcoming.look()) {
    const Tile& tile = upcoming.tile;
#pragma unroll 1
    for (int k = 0; k < tile.rows; k += kDepth, ring.next()) {
      mbar_wait(empty + ring.stage * 8, ring.phase ^ 1);
      const u32 bar = full + ring.stage * 8, to = stages + ring.stage * kStageBytes;
      const int steps = min(kSteps, (tile.rows - k + 15) / 16), row = tile.row + k;
      mbar_expect(bar, steps * 16 * (kIsX ? kIn : kOut) * 2);
#pragma unroll
      for (int b = 0; b < 2; ++b) {
        if constexpr (kIsX) {
          const int block = rank * 2 + b;
          load_to_both(to + kBytesDy + block * kColumnBytes, &a.x[steps - 1], tile.in + block * 64,
                       row, bar);
        } else {
          bulk_load_box(to + b * kColumnBytes, &a.dy[steps - 1], tile.out + b * 64, row, bar);
        }
      }
    }
  }
}

/// Sets the rows from `rows` up to the next multiple of 16 to zeros, in what this warpgroup reads
/// of a stage. Both warpgroups write the same zeros to x.
__device__ __forceinline__ void clear_rows(u32 stage, int group, int rows) {
  const int words = (-rows & 15) * 32;
  for (int word = static_cast<int>(threadIdx.x & 127); word < words; word += 128) {
    const u32 at = stage + rows * 128 + word * 4;
    st_shared4(at + group * kColumnBytes, 0);
#pragma unroll
    for (int b = 0; b < kIn / 64; ++b) st_shared4(at + kBytesDy + b * kColumnBytes, 0);
  }
  fence_async_proxy();
  named_sync(1 + group, 128);
}

/// Blocks of 64 columns lie kColumnBytes apart, not kBlockBytes.
__device__ __forceinline__ u64 stage_descriptor(u32 address) {
  constexpr u64 kNearer = (u64{kBlockBytes} - kColumnBytes) >> 4 << 16;
  return make_descriptor(address) - kNearer;
}

template <int kCount>
__device__ __forceinline__ void multiply_steps(float (&acc)[kIn / 8][4], u32 stage, int group) {
  const u64 dy = stage_descriptor(stage + group * kColumnBytes),
            x = stage_descriptor(stage + kBytesDy);
  MmaHopper::fence();
#pragma unroll
  for (int i = 0; i < kCount; ++i) {
    const u32 at = MmaHopper::offset<true>(i) >> 4;
    wgmma_ss<1, 1>(acc, dy + at, x + at, 1);
  }
  MmaHopper::commit();
}

/// A warpgroup's 64 x 256 sums to memory, 64 columns at a time through two shared tiles.
__device__ __forceinline__ void write_out(const Args& a, const Tile& tile,
                                          const float (&acc)[kIn / 8][4], u32 out, int group,
                                          int& turn) {
  const int thread = threadIdx.x & 127, lane = threadIdx.x & 31, warp = thread / 32;
  const int row = tile.out + group * 64;
  if (row >= a.out) return;
#pragma unroll
  for (int c = 0; c < kIn / 64; ++c) {
    const int column = tile.in + c * 64;
    if (column >= a.in) return;
    const u32 staged = out + (turn++ & 1) * kOutBytes;
    if (thread == 0) bulk_wait_read<1>();
    named_sync(1 + group, 128);
#pragma unroll
    for (int b = 0; b < 4; ++b) {
      const int n = c * 8 + b * 2;
      const u32 f[4] = {pack_bf16(acc[n][0], acc[n][1]), pack_bf16(acc[n][2], acc[n][3]),
                        pack_bf16(acc[n + 1][0], acc[n + 1][1]),
                        pack_bf16(acc[n + 1][2], acc[n + 1][3])};
      store_fragment(staged, 64, warp * 16, b * 16, lane, f);
    }
    fence_async_proxy();
    named_sync(1 + group, 128);
    if (thread == 0) {
      bulk_store_box(&a.dw, column, tile.expert * a.out + row, staged);
      bulk_commit();
    }
  }
}

__device__ void multiply(const Args& a, const uint16_t* order, u32 stages, u32 full, u32 empty,
                         u32 out, int rank) {
  const int group = static_cast<int>(threadIdx.x) / 128 - 1, lane = threadIdx.x & 31;
  out += group * 2 * kOutBytes;
  // Lanes 0 and 1 tell the two CTAs.
  const auto release = [&](int stage) {
    if (lane < 2) arrive_at(empty + stage * 8, lane);
  };
  Ring ring;
  int turn = 0;  // of the two tiles on the way out
  Upcoming upcoming{a, order, rank};
  upcoming.look();
  while (upcoming.is_any) {
    const Tile tile = upcoming.tile;
    float acc[kIn / 8][4];
    zero(acc);
    int previous = -1;
#pragma unroll 1
    for (int left = tile.rows; left > 0; left -= kDepth, ring.next()) {
      mbar_wait(full + ring.stage * 8, ring.phase);
      const u32 stage = stages + ring.stage * kStageBytes;
      if (left < kDepth && left % 16 != 0) clear_rows(stage, group, left);
      if (left <= 16) {
        multiply_steps<1>(acc, stage, group);
      } else {
        multiply_steps<2>(acc, stage, group);
      }
      MmaHopper::wait<1>();
      if (previous >= 0) release(previous);
      previous = ring.stage;
    }
    upcoming.look();
    MmaHopper::wait<0>();
    if (previous >= 0) release(previous);
    pin(acc);
    write_out(a, tile, acc, out, group, turn);
  }
  if ((threadIdx.x & 127) == 0) bulk_wait_all();
}

#endif

__global__ void __launch_bounds__(kThreads, 1)
    grouped_weight_gradient_kernel(const __grid_constant__ Args args) {
#if defined(__CUDA_ARCH_FEAT_SM90_ALL)
  // Swizzled tiles begin on 1024 bytes; there is no room to move them.
  extern __shared__ __align__(1024) unsigned char memory[];
  const u32 stages = smem_u32(memory);
  if ((stages & 1023u) != 0) __trap();
  const int rank = static_cast<int>(rank_in_cluster());
  const u32 out = stages + kStages * kStageBytes;
  const u32 full = out + 4 * kOutBytes, empty = full + kStages * 8;
  auto* const order = reinterpret_cast<uint16_t*>(memory + (empty + kStages * 8 - stages));
  if (threadIdx.x == 0) {
    for (int s = 0; s < kStages; ++s) {
      mbar_init(full + s * 8, 2);
      mbar_init(empty + s * 8, 16);
    }
    fence_cluster_barriers();
  }
  // The stages are not in use yet.
  int* const sizes = reinterpret_cast<int*>(memory);
  for (int e = static_cast<int>(threadIdx.x); e < args.experts; e += kThreads)
    sizes[e] = args.ends[e] - (e == 0 ? 0 : args.ends[e - 1]);
  __syncthreads();
  order_by_size(sizes, args.experts, order);
  fence_async_proxy();
  cluster_sync();
  if (threadIdx.x < 128) {
    set_max_registers_down<40>();
    if (threadIdx.x == 0) load<false>(args, order, stages, full, empty, rank);
    if (threadIdx.x == 32) load<true>(args, order, stages, full, empty, rank);
  } else {
    set_max_registers_up<232>();
    multiply(args, order, stages, full, empty, out, rank);
  }
  // Neither leaves while the other still sends to it.
  cluster_sync();
#endif
}

}  // namespace

void grouped_weight_gradient(const GroupedWeightGradient& g, cudaStream_t stream) {
  const int64_t values = g.experts * g.out * g.in;
  if (g.experts < 1 || g.experts > kMostExperts || g.out < 64 || g.out % 64 != 0 || g.in < 64 ||
      g.in % 64 != 0 || g.rows >= int64_t{1} << 28 || values / 64 >= int64_t{1} << 31) {
    throw std::invalid_argument("grouped_weight_gradient (cuda): " + std::to_string(g.experts) +
                                " experts, " + std::to_string(g.rows) + " rows, matrices " +
                                std::to_string(g.out) + " x " + std::to_string(g.in));
  }
  if (g.rows == 0) {
    cudaMemsetAsync(g.dw, 0, static_cast<size_t>(values) * 2, stream);
    return check_launch("grouped_weight_gradient");
  }
  Args args;
  for (int i = 0; i < kSteps; ++i) {
    args.dy[i] = tensor_map(g.dy, g.rows, g.out, g.out, (i + 1) * 16);
    args.x[i] = tensor_map(g.x, g.rows, g.in, g.in, (i + 1) * 16);
  }
  args.dw = tensor_map(g.dw, g.experts * g.out, g.in, g.in, 64);
  args.ends = g.ends;
  args.experts = static_cast<int>(g.experts);
  args.out = static_cast<int>(g.out);
  args.in = static_cast<int>(g.in);
  args.columns = static_cast<int>((g.in + kIn - 1) / kIn);
  args.tiles = static_cast<int>((g.out + 2 * kOut - 1) / (2 * kOut)) * args.columns;
  launch_pairs(grouped_weight_gradient_kernel, multiprocessors() / 2, kThreads, kSharedBytes,
               stream, args);
  check_launch("grouped_weight_gradient");
}

}  // namespace heddle::ops::cuda
