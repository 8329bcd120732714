// Sums of matrix products by wgmma. One kernel walks over the depth of all terms of a sum, so that
// neither a low-rank change of a weight nor a second weight costs a pass over the result.
//
// Work: persistent clusters of two CTAs; a cluster takes tiles of 256 rows x 256 columns, each CTA
// 128 of the rows. Both need the same 256 columns of b: each loads half of a stage and sends it to
// both. Warpgroup 0 loads; warpgroups 1 and 2 multiply 64 rows each, 128 accumulators a thread.
// A term of some rows alone (the change of one of several sets of adapters) is left out of tiles
// that have none of them; in the others the copies fill its rows of a with zeros.
// A sum of up to 64 columns takes tiles of 64: products with zeros for the other 192 would take as
// long as a wide layer's. The first CTA loads their b for both. So do, or of 128, all sums of few
// rows, whose wide tiles would leave multiprocessors without work.
//
// Shared memory: 4 stages of 64 in depth, a 16 KB + b 32 KB each; two tiles of 64 x 64 a
// multiplying warpgroup on the way out, 32 KB; barriers. All tiles have the 128-byte swizzle.
// What a sum begins with waits in registers, whole lines of memory as they were read (64 a thread,
// half of them from before the products on), and is exchanged through the tiles on the way out.
//
// Terms in 8-bit floats come first in a sum (kEight). A stage holds twice the depth of them in the
// same bytes, and so do the steps of wgmma: the ring, the boxes and the descriptors are those of
// bf16. After each of these terms the accumulators take its scales, or the ratio to the next's.
//
// full[s]: the bytes of a stage have landed here. empty[s]: the 16 multiplying warps of both CTAs
// are done with it; both loaders wait for it, because each writes into both CTAs.
#include <algorithm>
#include <stdexcept>

#include "ops/cuda/cta_pair.cuh"
#include "ops/cuda/element.h"
#include "ops/cuda/mma.cuh"
#include "ops/cuda/tensor_map.h"
#include "ops/linear/cuda/product_sum.h"
#include "ops/linear/cuda/product_sum_tiles.h"

namespace heddle::ops::cuda {
namespace {

constexpr int kDepth = 64, kStages = 4, kThreads = 384;
constexpr u32 kBytesA = kRows * kDepth * 2, kBytesB = kColumns * kDepth * 2;
constexpr u32 kStageBytes = kBytesA + kBytesB, kOutBytes = 64 * 64 * 2;
constexpr u32 kSharedBytes = kStages * kStageBytes + 4 * kOutBytes + 2 * kStages * 8 + 1024;
struct Term {
  int a, b;   // indices of maps
  int steps;  // of 16 in depth, 32 of 8-bit floats
  int first_row, end_row;
  const float *a_scales, *b_scales;
};

struct Args {
  CUtensorMap maps[2 * kMostProductTerms + kMostProductSums];
  Term terms[kMostProductTerms];
  struct Sum {
    int first_tile, first_term, first_wide_term, end_term, map;
    int blocks;  // of 64 columns a tile: 1, 2 or 4
    int columns;
    const bf16* start;
    int64_t start_stride;
  } sums[kMostProductSums];
  int sum_count, row_pairs, column_tiles, rows;
};

#if defined(__CUDA_ARCH_FEAT_SM90_ALL)

__device__ __forceinline__ void st_shared16(u32 addr, uint4 v) {
  asm volatile("st.shared.v4.u32 [%0], {%1, %2, %3, %4};" ::"r"(addr), "r"(v.x), "r"(v.y), "r"(v.z),
               "r"(v.w)
               : "memory");
}

/// Tiles of this many row pairs are done for all columns before the next ones: with as many columns
/// they are what runs at the same time, and share their rows and columns in the cache.
constexpr int kGroup = 8;

/// Place of a tile: rows of the pair, columns of a sum.
struct Place {
  const Args::Sum* sum;
  int row, column, pair_row;

  /// Whether the tile of the pair has rows of the term.
  __device__ __forceinline__ bool has(const Term& term) const {
    return pair_row < term.end_row && pair_row + 2 * kRows > term.first_row;
  }
};

__device__ __forceinline__ Place place_of(const Args& a, int tile, int rank) {
  const int per_group = kGroup * a.column_tiles;
  const int group = tile / per_group, in_group = tile % per_group;
  const int height = min(kGroup, a.row_pairs - group * kGroup);
  const int pair = group * kGroup + in_group % height, column = in_group / height;
  int s = 0;
  while (s + 1 < a.sum_count && column >= a.sums[s + 1].first_tile) ++s;
  return {&a.sums[s], (2 * pair + rank) * kRows,
          (column - a.sums[s].first_tile) * a.sums[s].blocks * 64, 2 * pair * kRows};
}

struct Ring {
  int stage = 0, phase = 0;
  __device__ __forceinline__ void next() {
    if (++stage == kStages) {
      stage = 0;
      phase ^= 1;
    }
  }
};

template <int kTransB, bool kEight>
__device__ void load(const Args& a, u32 stages, u32 full, u32 empty, int rank) {
  Ring ring;
  const int tiles = a.row_pairs * a.column_tiles;
  for (int tile = blockIdx.x / 2; tile < tiles; tile += gridDim.x / 2) {
    const Place place = place_of(a, tile, rank);
    const int blocks = place.sum->blocks, own = max(1, blocks / 2);
    for (int t = place.sum->first_term; t < place.sum->end_term; ++t) {
      if (!place.has(a.terms[t])) continue;
      const int row = place.row - a.terms[t].first_row;
      const void* map_a = &a.maps[a.terms[t].a];
      const void* map_b = &a.maps[a.terms[t].b];
      const int depth = a.terms[t].steps * 16;
#pragma unroll 1
      for (int k = 0; k < depth; k += kDepth, ring.next()) {
        mbar_wait(empty + ring.stage * 8, ring.phase ^ 1);
        const u32 bar = full + ring.stage * 8, to = stages + ring.stage * kStageBytes;
        mbar_expect(bar, kBytesA + blocks * kBlockBytes);
        bulk_load_box(to, map_a, k, row, bar);
        if (rank >= blocks) continue;
        const int first = rank * own;
        const u32 part = to + kBytesA + first * kBlockBytes;
        if (kTransB && !(kEight && t < place.sum->first_wide_term)) {
          for (int i = 0; i < own; ++i)
            load_to_both(part + i * kBlockBytes, map_b, place.column + (first + i) * 64, k, bar);
        } else {
          load_to_both(part, map_b, k, place.column + first * 64, bar);
        }
      }
    }
  }
}

/// Two of the 4 blocks of 64 columns that a sum begins with are read before the products: all of
/// them would leave too few registers, and those read after the products come late.
constexpr int kEarly = 2;

/// One stage: kSteps of 16 in depth. Beyond the depth of its matrices a stage holds zeros, so that
/// four steps are always right; a rank of 16 takes one.
template <int kTransB, int kSteps, int kBlocks>
__device__ __forceinline__ void multiply_stage(float (&acc)[kBlocks][4], u32 stage, int group,
                                               bool first) {
  const u64 da = make_descriptor(stage + group * kBlockBytes);
  const u64 db = make_descriptor(stage + kBytesA);
  MmaHopper::fence();
#pragma unroll
  for (int k = 0; k < kSteps; ++k)
    wgmma_ss<0, kTransB>(acc, da + ((k * 32) >> 4), db + ((kTransB ? k * 2048 : k * 32) >> 4),
                         !first || k > 0);
  MmaHopper::commit();
}

/// This is for 8-bit floats, whose b lies as in the form that is not transposed.
__device__ __forceinline__ void multiply_eight_bit_stage(float (&acc)[32][4], u32 stage, int group,
                                                         bool first) {
  const u64 da = make_descriptor(stage + group * kBlockBytes);
  const u64 db = make_descriptor(stage + kBytesA);
  MmaHopper::fence();
#pragma unroll
  for (int k = 0; k < 4; ++k)
    wgmma_ss_e4m3(acc, da + ((k * 32) >> 4), db + ((k * 32) >> 4), !first || k > 0);
  MmaHopper::commit();
}

/// The scales of a term in 8 bits for the sums of a warp: of its rows, and of a part of the columns
/// in each lane, since all of them would take half as many registers as the sums. Asked for before
/// the products, so that nothing waits for them. Those outside of the result are any.
struct Scales {
  float rows[2];
  float2 columns[4];  ///< lane: columns 8 n + 2 (lane % 4) for n = lane / 4 * 4 + 0 .. 3

  __device__ __forceinline__ void load(const Args& a, const Place& place, const Term& term,
                                       int group) {
    const int lane = threadIdx.x & 31, warp = (threadIdx.x >> 5) & 3;
    const int row = place.row + group * 64 + warp * 16 + lane / 4;
#pragma unroll
    for (int i = 0; i < 2; ++i) rows[i] = __ldg(term.a_scales + min(row + i * 8, a.rows - 1));
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      const int column = place.column + (lane / 4 * 4 + i) * 8 + (lane & 3) * 2;
      columns[i] = __ldg(
          reinterpret_cast<const float2*>(term.b_scales + min(column, place.sum->columns - 2)));
    }
  }
  /// The ratio to another term's.
  __device__ __forceinline__ void divide_by(const Scales& other) {
#pragma unroll
    for (int i = 0; i < 2; ++i) rows[i] = __fdividef(rows[i], other.rows[i]);
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      columns[i].x = __fdividef(columns[i].x, other.columns[i].x);
      columns[i].y = __fdividef(columns[i].y, other.columns[i].y);
    }
  }
  __device__ __forceinline__ void apply_to(float (&acc)[32][4]) const {
    const int lane = threadIdx.x & 31;
#pragma unroll
    for (int n = 0; n < 32; ++n) {
      const int owner = n / 4 * 4 + (lane & 3);
      const float x = __shfl_sync(0xffffffffu, columns[n % 4].x, owner);
      const float y = __shfl_sync(0xffffffffu, columns[n % 4].y, owner);
      acc[n][0] *= rows[0] * x;
      acc[n][1] *= rows[0] * y;
      acc[n][2] *= rows[1] * x;
      acc[n][3] *= rows[1] * y;
    }
  }
};

/// 64 columns of what a sum begins with, of the 16 rows of a warp: 8 lanes read a line of a row.
struct Start {
  uint4 lines[4];

  __device__ __forceinline__ void load(const Args& a, const Place& place, int first_row, int c) {
    const int lane = threadIdx.x & 31, column = place.column + c * 64 + (lane & 7) * 8;
    const Args::Sum& sum = *place.sum;
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      const int row = first_row + i * 4 + lane / 8;
      const bool is_inside = row < a.rows && column < sum.columns;
      const bf16* const line = sum.start + row * sum.start_stride + column;
      lines[i] = is_inside ? __ldg(reinterpret_cast<const uint4*>(line)) : uint4{0, 0, 0, 0};
    }
  }
  /// Adds them to 64 columns of sums, through the place of `tile` that these take on the way out.
  __device__ __forceinline__ void add_to(float (*acc)[4], u32 tile, int warp) const {
    const int lane = threadIdx.x & 31, m = lane / 8, r = lane & 7;
#pragma unroll
    for (int i = 0; i < 4; ++i)
      st_shared16(tile_address(tile, 64, warp * 16 + i * 4 + m, r * 8), lines[i]);
    __syncwarp();
#pragma unroll
    for (int b = 0; b < 4; ++b) {
      u32 f[4];
      ldmatrix4(f, tile_address(tile, 64, warp * 16 + (m & 1) * 8 + r, b * 16 + (m >> 1) * 8));
#pragma unroll
      for (int i = 0; i < 4; ++i) {
        float* const pair = &acc[b * 2 + i / 2][(i & 1) * 2];
        pair[0] += __uint_as_float(f[i] << 16);
        pair[1] += __uint_as_float(f[i] & 0xffff0000u);
      }
    }
    __syncwarp();
  }
};

/// Sums of 64 rows to memory, 64 columns at a time through two shared tiles.
template <bool kStarts, int kBlocks>
__device__ __forceinline__ void write_out(const Args& a, const Place& place,
                                          float (&acc)[kBlocks][4], u32 out, int group,
                                          const Start* start) {
  const int lane = threadIdx.x & 31, warp = (threadIdx.x >> 5) & 3;
  const bool leader = (threadIdx.x & 127) == 0;
#pragma unroll
  for (int c = 0; c < kBlocks / 8; ++c) {
    const u32 tile = out + (c & 1) * kOutBytes;
    if (leader) bulk_wait_read<1>();
    named_sync(1 + group, 128);
    if constexpr (kStarts) start[c].add_to(&acc[c * 8], tile, warp);
#pragma unroll
    for (int b = 0; b < 4; ++b) {
      const int n = c * 8 + b * 2;
      const u32 f[4] = {pack_bf16(acc[n][0], acc[n][1]), pack_bf16(acc[n][2], acc[n][3]),
                        pack_bf16(acc[n + 1][0], acc[n + 1][1]),
                        pack_bf16(acc[n + 1][2], acc[n + 1][3])};
      store_fragment(tile, 64, warp * 16, b * 16, lane, f);
    }
    fence_async_proxy();
    named_sync(1 + group, 128);
    if (leader) {
      bulk_store_box(&a.maps[place.sum->map], place.column + c * 64, place.row + group * 64, tile);
      bulk_commit();
    }
  }
}

/// The sums of a tile, 8 * kBlocks columns of them, from the ring to memory.
template <int kTransB, int kBlocks, bool kStarts, bool kEight>
__device__ __forceinline__ void multiply_tile(const Args& a, const Place& place, Ring& ring,
                                              u32 stages, u32 full, u32 empty, u32 out, int group) {
  const int lane = threadIdx.x & 31;
  float acc[kBlocks][4];
  // Lanes 0 and 1 tell the two CTAs.
  const auto release = [&](int stage) {
    if (lane < 2) arrive_at(empty + stage * 8, lane);
  };
  Start start[kStarts ? kBlocks / 8 : 1];
  const auto load_start = [&](int from, int to) {
    const int row = place.row + group * 64 + ((threadIdx.x >> 5) & 3) * 16;
#pragma unroll
    for (int c = from; c < to; ++c) start[c].load(a, place, row, c);
  };
  constexpr int kFirst = kEarly < kBlocks / 8 ? kEarly : kBlocks / 8;
  if constexpr (kStarts) load_start(0, kFirst);
  int previous = -1, t = place.sum->first_term;
  bool first = true;
  if constexpr (kEight) {
    for (; t < place.sum->first_wide_term; ++t) {
      Scales scales;
      scales.load(a, place, a.terms[t], group);
#pragma unroll 1
      for (int steps = a.terms[t].steps; steps > 0; steps -= 4, ring.next()) {
        mbar_wait(full + ring.stage * 8, ring.phase);
        multiply_eight_bit_stage(acc, stages + ring.stage * kStageBytes, group, first);
        first = false;
        MmaHopper::wait<1>();
        if (previous >= 0) release(previous);
        previous = ring.stage;
      }
      MmaHopper::wait<0>();
      pin(acc);
      release(previous);
      previous = -1;
      if (t + 1 < place.sum->first_wide_term) {
        Scales next;
        next.load(a, place, a.terms[t + 1], group);
        scales.divide_by(next);
      }
      scales.apply_to(acc);
      pin(acc);
    }
  }
  for (; t < place.sum->end_term; ++t) {
    if (!place.has(a.terms[t])) continue;
    int steps = a.terms[t].steps;
#pragma unroll 1
    for (; steps > 0; steps -= 4, ring.next()) {
      mbar_wait(full + ring.stage * 8, ring.phase);
      const u32 stage = stages + ring.stage * kStageBytes;
      if (steps > 1) {
        multiply_stage<kTransB, 4>(acc, stage, group, first);
      } else {
        multiply_stage<kTransB, 1>(acc, stage, group, first);
      }
      first = false;
      MmaHopper::wait<1>();
      if (previous >= 0) release(previous);
      previous = ring.stage;
    }
  }
  if constexpr (kStarts) load_start(kFirst, kBlocks / 8);
  MmaHopper::wait<0>();
  pin(acc);
  if (previous >= 0) release(previous);
  write_out<kStarts>(a, place, acc, out, group, start);
}

/// kWide: blocks of the tiles of all sums but narrow ones.
template <int kTransB, bool kStarts, bool kEight, int kWide>
__device__ void multiply(const Args& a, u32 stages, u32 full, u32 empty, u32 out, int rank) {
  const int group = threadIdx.x / 128 - 1;
  out += group * 2 * kOutBytes;
  Ring ring;
  const int tiles = a.row_pairs * a.column_tiles;
  for (int tile = blockIdx.x / 2; tile < tiles; tile += gridDim.x / 2) {
    const Place place = place_of(a, tile, rank);
    if constexpr (kWide > 1 && !kTransB && !kStarts) {
      if (place.sum->blocks == 1) {
        multiply_tile<kTransB, 8, false, false>(a, place, ring, stages, full, empty, out, group);
        continue;
      }
    }
    multiply_tile<kTransB, kWide * 8, kStarts, kEight>(a, place, ring, stages, full, empty, out,
                                                       group);
  }
  if ((threadIdx.x & 127) == 0) bulk_wait_all();
}

#endif

template <int kTransB, bool kStarts, bool kEight, int kWide>
__global__ void __launch_bounds__(kThreads, 1)
    product_sum_kernel(const __grid_constant__ Args args) {
#if defined(__CUDA_ARCH_FEAT_SM90_ALL)
  extern __shared__ unsigned char memory[];
  const u32 stages = (smem_u32(memory) + 1023) & ~1023u;
  const u32 out = stages + kStages * kStageBytes;
  const u32 full = out + 4 * kOutBytes, empty = full + kStages * 8;
  const int rank = static_cast<int>(rank_in_cluster());
  if (threadIdx.x == 0) {
    for (int s = 0; s < kStages; ++s) {
      mbar_init(full + s * 8, 1);
      mbar_init(empty + s * 8, 16);
    }
    fence_cluster_barriers();
  }
  cluster_sync();
  if (threadIdx.x < 128) {
    set_max_registers_down<40>();
    if (threadIdx.x == 0) load<kTransB, kEight>(args, stages, full, empty, rank);
  } else {
    set_max_registers_up<232>();
    multiply<kTransB, kStarts, kEight, kWide>(args, stages, full, empty, out, rank);
  }
  // Neither leaves while the other still sends to it.
  cluster_sync();
#endif
}

}  // namespace

bool product_sums_available() { return has_sm90a(); }

namespace {

/// A matrix in 8 bits is copied as pairs of bytes: [rows, width / 2] of 16 bits.
CUtensorMap map_of(const void* data, int64_t rows, int64_t width, int64_t stride, int box_rows,
                   bool is_eight_bit) {
  return is_eight_bit ? tensor_map(data, rows, width / 2, stride / 2, box_rows)
                      : tensor_map(data, rows, width, stride, box_rows);
}

template <bool kEight, int kWide>
auto kernel_of(bool b_has_depth_first, bool starts) {
  return b_has_depth_first ? product_sum_kernel<1, false, kEight, kWide>
         : starts          ? product_sum_kernel<0, true, kEight, kWide>
                           : product_sum_kernel<0, false, kEight, kWide>;
}

}  // namespace

void product_sums(int64_t rows, const std::vector<ProductSum>& sums, bool b_has_depth_first,
                  cudaStream_t stream) {
  Args args;
  int maps = 0, terms = 0;
  const auto is_eight_bit = [](const ProductTerm& term) { return term.is_eight_bit(); };
  bool has_eight_bit = false;
  args.sum_count = static_cast<int>(sums.size());
  args.row_pairs = static_cast<int>((rows + 2 * kRows - 1) / (2 * kRows));
  args.column_tiles = 0;
  args.rows = static_cast<int>(rows);
  if (sums.empty() || sums.size() > kMostProductSums)
    throw std::runtime_error("product_sums (cuda): too many sums");
  const bool starts = sums[0].start != nullptr;
  for (const ProductSum& sum : sums)
    has_eight_bit |= std::any_of(sum.terms.begin(), sum.terms.end(), is_eight_bit);
  const int wide_blocks = has_eight_bit ? kWidest : blocks_of_tiles(args.row_pairs, sums);
  for (std::size_t i = 0; i < sums.size(); ++i) {
    const ProductSum& sum = sums[i];
    if (terms + sum.terms.size() > kMostProductTerms)
      throw std::runtime_error("product_sums (cuda): too many terms");
    if ((sum.start != nullptr) != starts || (starts && b_has_depth_first))
      throw std::runtime_error("product_sums (cuda): not all of them have a start");
    const bool is_narrow = !b_has_depth_first && !starts && sum.columns <= kNarrowColumns;
    const auto eight_bit =
        static_cast<int>(std::count_if(sum.terms.begin(), sum.terms.end(), is_eight_bit));
    if (eight_bit > 0 && is_narrow)
      throw std::runtime_error("product_sums (cuda): a narrow sum has terms in 8 bits");
    const int blocks = is_narrow ? 1 : wide_blocks;
    args.sums[i] = {args.column_tiles,
                    terms,
                    terms + eight_bit,
                    terms + static_cast<int>(sum.terms.size()),
                    maps,
                    blocks,
                    static_cast<int>(sum.columns),
                    static_cast<const bf16*>(sum.start),
                    sum.start_stride};
    args.maps[maps++] = tensor_map(sum.y, rows, sum.columns, sum.y_stride, 64);
    args.column_tiles += static_cast<int>((sum.columns + blocks * 64 - 1) / (blocks * 64));
    for (const bool eight_bit_ones : {true, false}) {
      for (const ProductTerm& term : sum.terms) {
        if (term.is_eight_bit() != eight_bit_ones) continue;
        const int64_t depth_step = eight_bit_ones ? 32 : 16;
        const int64_t own = term.term_rows > 0 ? term.term_rows : rows;
        args.terms[terms++] = {maps,
                               maps + 1,
                               static_cast<int>((term.depth + depth_step - 1) / depth_step),
                               static_cast<int>(term.first_row),
                               static_cast<int>(term.first_row + own),
                               term.a_scales,
                               term.b_scales};
        args.maps[maps++] = map_of(term.a, own, term.depth, term.a_stride, kRows, eight_bit_ones);
        args.maps[maps++] = b_has_depth_first && !eight_bit_ones
                                ? tensor_map(term.b, term.depth, sum.columns, term.b_stride, kDepth)
                                : map_of(term.b, sum.columns, term.depth, term.b_stride,
                                         std::max(1, blocks / 2) * 64, eight_bit_ones);
      }
    }
  }
  const int clusters = std::min(args.row_pairs * args.column_tiles, multiprocessors() / 2);
  if (clusters == 0) return;
  const auto kernel = has_eight_bit      ? kernel_of<true, kWidest>(b_has_depth_first, starts)
                      : wide_blocks == 1 ? kernel_of<false, 1>(b_has_depth_first, starts)
                      : wide_blocks == 2 ? kernel_of<false, 2>(b_has_depth_first, starts)
                                         : kernel_of<false, kWidest>(b_has_depth_first, starts);
  launch_pairs(kernel, clusters, kThreads, kSharedBytes, stream, args);
  check_launch("product_sums");
}

}  // namespace heddle::ops::cuda
