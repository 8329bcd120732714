// One product for each expert, over rows that are sorted by expert.
//
// The weight is the operand of 128 rows and the tokens are the columns of a tile, as many as the
// expert has, in steps of 32 and at most 288 (in 8-bit floats 256): experts of a few hundred rows
// would leave a fifth of tiles of 128 token rows empty. An expert with more rows has several tiles
// of nearly equal size. Most experts of 256 rows in the mean have at most 288, so that their
// weights are read once.
//
// Work: persistent clusters of two CTAs; a cluster takes tiles of 256 features x up to 288 tokens,
// each CTA 128 of the features. Both need the same tokens: each loads half of a stage's and sends
// it to both, because the link between the halves of the L2 could not feed all CTAs otherwise; it
// is the limit of this kernel. Which cluster takes what: token_tiles.cuh. Warpgroup 0 loads;
// warpgroups 1 and 2 multiply 64 features each, up to 144 accumulators a thread.
//
// Shared memory: 4 stages of 64 in depth, weight 16 KB + tokens 36 KB each; two tiles of 32 tokens
// x 64 features a multiplying warpgroup on the way out, 16 KB, turned by stmatrix; the table of
// tiles, 2 KB; barriers. All tiles have the 128-byte swizzle.
//
// In 8-bit floats a stage has twice the depth in the same bytes, and boxes count pairs of values as
// elements. wgmma wants the contraction along the rows of 8-bit operands: where the depth comes
// first in the weight, warps bring it to registers (ldmatrix turns pairs of features, byte permutes
// take them apart), so that one copy of the weights serves the forward and the backward. A warp's
// features 2 i and 2 i + 1 are then rows i and i + 8 of its fragment.
//
// full[s]: the bytes of a stage have landed here. empty[s]: the 16 multiplying warps of both CTAs
// are done with it; both loaders wait for it, because each writes into both CTAs.
#include <algorithm>
#include <stdexcept>
#include <string>

#include "ops/cuda/cta_pair.cuh"
#include "ops/cuda/mma.cuh"
#include "ops/cuda/tensor_map.h"
#include "ops/cuda/wgmma_e4m3.cuh"
#include "ops/moe/cuda/grouped_product.h"
#include "ops/moe/cuda/token_tiles.cuh"

namespace heddle::ops::cuda {
namespace {

/// kDepth: of a stage in elements of 2 bytes; in 8-bit floats these are two values.
constexpr int kFeatures = 128, kDepth = 64, kStages = 4, kStep = 32, kMostTokens = 288;
constexpr int kThreads = 384;
constexpr u32 kBytesWeight = kFeatures * kDepth * 2;

/// A product: its type, and whether the depth comes first in the weight.
template <bool kIsEightBit, bool kIsDepthFirst>
struct Kind {
  static constexpr bool kEightBit = kIsEightBit, kDepthFirst = kIsDepthFirst;
  /// Columns of the largest tile, and tokens of a tile on the way out. With more columns 8-bit
  /// products would lack registers.
  static constexpr int kTokens = kEightBit ? 256 : kMostTokens, kOutRows = kEightBit ? 64 : 32;
  static constexpr u32 kStageBytes = kBytesWeight + kTokens * kDepth * 2;
  static constexpr u32 kOutBytes = kOutRows * 64 * 2;
  static constexpr u32 kSharedBytes =
      kStages * kStageBytes + 4 * kOutBytes + 2 * kStages * 8 + (kMostExperts + 1) * 4;
  static_assert(kSharedBytes <= 227 * 1024);
  using Tiles = TokenTiles<kStep, kTokens, /*kLargestFirst=*/!kEightBit>;
  static_assert((int64_t{1} << 28) / kTokens + kMostExperts < Tiles::kMostTiles &&
                kMostExperts <= 1 << Tiles::kExpertBits);
};

struct Args {
  CUtensorMap weight, y;
  CUtensorMap tokens[kMostTokens / kStep];  ///< Boxes of half a tile's columns: 16, 32, ... rows.
  bf16* out;
  const int32_t* ends;
  int experts, width, depth, feature_pairs;  ///< depth in elements of 2 bytes
  EightBitProduct scales;
};

#if defined(__CUDA_ARCH_FEAT_SM90_ALL)

/// Columns that the products of a tile have.
__device__ __forceinline__ int columns_of(const Place& place) {
  return (place.rows + kStep - 1) / kStep * kStep;
}

/// The next tile of a cluster, its feature the first of this CTA, which is `rank` in its cluster.
template <class K>
struct Upcoming {
  const Args& a;
  const int* table;
  int rank, round = 0;
  bool is_any = false;
  Place place = {};

  __device__ __forceinline__ void look() {
    const typename K::Tiles tiles{table, a.ends, a.experts};
    const int clusters = static_cast<int>(gridDim.x / 2), own = static_cast<int>(blockIdx.x / 2);
    const int item = round * clusters + tiles.turn(round, own, clusters);
    ++round;
    const int tile = item / a.feature_pairs;
    is_any = tile < tiles.count();
    if (!is_any) return;
    tiles.find(tile, place);
    place.feature = ((item - tile * a.feature_pairs) * 2 + rank) * kFeatures;
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

template <class K>
__device__ void load(const Args& a, const int* table, u32 stages, u32 full, u32 empty, int rank) {
  Ring ring;
  Upcoming<K> upcoming{a, table, rank};
  for (upcoming.look(); upcoming.is_any; upcoming.look()) {
    const Place& place = upcoming.place;
    const int columns = columns_of(place), half = columns / 2;
    const void* const tokens = &a.tokens[columns / kStep - 1];
#pragma unroll 1
    for (int k = 0; k < a.depth; k += kDepth, ring.next()) {
      mbar_wait(empty + ring.stage * 8, ring.phase ^ 1);
      const u32 bar = full + ring.stage * 8, to = stages + ring.stage * K::kStageBytes;
      mbar_expect(bar, kBytesWeight + columns * kDepth * 2);
      if constexpr (K::kEightBit && K::kDepthFirst) {
        bulk_load_box(to, &a.weight, place.feature / 2, (place.expert * a.depth + k) * 2, bar);
      } else if constexpr (K::kDepthFirst) {
        const int row = place.expert * a.depth + k;
        bulk_load_box(to, &a.weight, place.feature, row, bar);
        bulk_load_box(to + kBlockBytes, &a.weight, place.feature + 64, row, bar);
      } else {
        bulk_load_box(to, &a.weight, k, place.expert * a.width + place.feature, bar);
      }
      load_to_both(to + kBytesWeight + rank * half * kDepth * 2, tokens, k, place.row + rank * half,
                   bar);
    }
  }
}

/// Tokens of 64 features to memory, from the tile at which the warpgroup put them.
__device__ __forceinline__ void store_rows(const Args& a, int row, int rows, int feature,
                                           u32 tile) {
  for (int piece = static_cast<int>(threadIdx.x & 127); piece < rows * 8; piece += 128) {
    const int r = piece / 8, column = piece % 8 * 8;
    if (feature + column < a.width) {
      st_global16(a.out + (int64_t{row} + r) * a.width + feature + column,
                  ld_shared16(tile_address(tile, 64, r, column)));
    }
  }
}

/// The scales of a tile's tokens with that of its expert: lane l has tokens l, 32 + l, ... They are
/// found in two steps, each of loads that nothing waits for while products run.
template <class K, int kColumns>
struct Scales {
  float held[kColumns / 32], expert;
  u32 at[kColumns / 32];

  __device__ __forceinline__ void find(const Args& a, const Place& place) {
    if constexpr (!K::kEightBit) return;
    const int lane = static_cast<int>(threadIdx.x & 31);
    expert = a.scales.weight_scales[place.expert];
#pragma unroll
    for (int i = 0; i < kColumns / 32; ++i) {
      const int row = place.row + min(i * 32 + lane, place.rows - 1);
      at[i] = a.scales.source == nullptr ? row : static_cast<u32>(a.scales.source[row]);
    }
  }
  __device__ __forceinline__ void load(const Args& a) {
    if constexpr (!K::kEightBit) return;
    const u32 k = a.scales.source == nullptr ? 1 : static_cast<u32>(a.scales.k);
#pragma unroll
    for (int i = 0; i < kColumns / 32; ++i) held[i] = a.scales.x_scales[at[i] / k];
  }
  /// The scale of column `e`, 0 or 1, of this thread in block n of 8 columns.
  __device__ __forceinline__ float of(int n, int e) const {
    if constexpr (!K::kEightBit) return 1.f;
    const int lane = static_cast<int>(threadIdx.x & 3) * 2 + e;
    return expert * __shfl_sync(0xffffffffu, held[n / 4], n % 4 * 8 + lane);
  }
};

/// Blocks n and n + 1 of 8 columns, scaled, to rows r0 to r0 + 15 of a tile.
template <class K, int kColumns>
__device__ __forceinline__ void put_columns(const float (&acc)[kColumns / 8][4], int n,
                                            const Scales<K, kColumns>& scales, u32 tile, int r0,
                                            int warp, int lane) {
  float v[2][4];
#pragma unroll
  for (int i = 0; i < 2; ++i) {
    const float s[2] = {scales.of(n + i, 0), scales.of(n + i, 1)};
#pragma unroll
    for (int e = 0; e < 4; ++e) v[i][e] = K::kEightBit ? acc[n + i][e] * s[e & 1] : acc[n + i][e];
  }
  if constexpr (K::kEightBit && K::kDepthFirst) {
    // Both features of a token are here, side by side.
    const int column = warp * 16 + lane / 4 * 2;
#pragma unroll
    for (int i = 0; i < 2; ++i) {
#pragma unroll
      for (int e = 0; e < 2; ++e) {
        const u32 at = tile_address(tile, 64, r0 + i * 8 + lane % 4 * 2 + e, column & ~7);
        st_shared4(at + (column & 7) * 2, pack_bf16(v[i][e], v[i][e + 2]));
      }
    }
  } else {
    const u32 f[4] = {pack_bf16(v[0][0], v[0][1]), pack_bf16(v[0][2], v[0][3]),
                      pack_bf16(v[1][0], v[1][1]), pack_bf16(v[1][2], v[1][3])};
    store_fragment_trans(tile, 64, r0, warp * 16, lane, f);
  }
}

/// Sums of 64 features and kColumns tokens to memory, kOutRows of them at a time
/// through two shared tiles.
template <class K, int kColumns>
__device__ __forceinline__ void write_out(const Args& a, const Place& place,
                                          const float (&acc)[kColumns / 8][4],
                                          const Scales<K, kColumns>& scales, u32 out, int group,
                                          int& turn) {
  const int thread = threadIdx.x & 127, lane = threadIdx.x & 31, warp = thread / 32;
  const int feature = place.feature + group * 64;
#pragma unroll
  for (int c = 0; c < (kColumns + K::kOutRows - 1) / K::kOutRows; ++c) {
    const u32 tile = out + (turn++ & 1) * K::kOutBytes;
    if (thread == 0) bulk_wait_read<1>();
    named_sync(1 + group, 128);
#pragma unroll
    for (int b = 0; b < K::kOutRows / 16; ++b) {
      const int n = c * (K::kOutRows / 8) + b * 2;
      if (n >= kColumns / 8) continue;
      put_columns<K, kColumns>(acc, n, scales, tile, b * 16, warp, lane);
    }
    const int rows = min(K::kOutRows, place.rows - c * K::kOutRows),
              row = place.row + c * K::kOutRows;
    if (rows < K::kOutRows) {
      // Rows after these are another expert's.
      named_sync(1 + group, 128);
      store_rows(a, row, rows, feature, tile);
    } else {
      fence_async_proxy();
      named_sync(1 + group, 128);
      if (thread == 0) bulk_store_box(&a.y, feature, row, tile);
    }
    if (thread == 0) bulk_commit();
  }
}

/// 128 in depth of a warp's 16 features, from a tile whose rows are the depth: pairs of features of
/// four rows in a register each.
__device__ __forceinline__ void load_pairs(u32 (&m)[4][4], u32 tile, int piece, int lane) {
  const int r = lane & 7, half = lane >> 4, sub = lane >> 3 & 1, quad = r >> 1;
  // Lanes 2 and 3 of four have the pairs of rows exchanged: no two rows of a matrix are then in the
  // same banks.
  const int row = half * 16 + quad * 4 + (r & 1) + 2 * (sub ^ (quad >> 1));
  const u32 at = tile + row * 128 + ((piece ^ (row & 7)) << 4);
#pragma unroll
  for (int i = 0; i < 4; ++i) ldmatrix4_trans(m[i], at + i * 32 * 128);
}

/// Four fragments of a from what load_pairs brought.
__device__ __forceinline__ void take_apart(const u32 (&m)[4][4], u32 (&f)[4][4], int lane) {
  const u32 even = (lane & 2) == 0 ? 0x6420 : 0x2064, odd = (lane & 2) == 0 ? 0x7531 : 0x3175;
#pragma unroll
  for (int i = 0; i < 4; ++i) {
    f[i][0] = __byte_perm(m[i][0], m[i][1], even);
    f[i][1] = __byte_perm(m[i][0], m[i][1], odd);
    f[i][2] = __byte_perm(m[i][2], m[i][3], even);
    f[i][3] = __byte_perm(m[i][2], m[i][3], odd);
  }
}

template <class K, int kColumns>
__device__ __forceinline__ void multiply_tile(const Args& a, const Place& place, Ring& ring,
                                              u32 stages, u32 full, u32 empty, u32 out, int group,
                                              int& turn, Upcoming<K>& upcoming) {
  // Without a value they would be alive from tile to tile, with those of all other widths.
  float acc[kColumns / 8][4];
  zero(acc);
  Scales<K, kColumns> scales;
  // Between a stage's products, which run by themselves, and the wait for them.
  const auto meanwhile = [&](int k) {
    if (k == 0) {
      scales.find(a, place);
      upcoming.look();
    } else if (k == kDepth) {
      scales.load(a);
    }
  };
  const int lane = threadIdx.x & 31, warp = static_cast<int>(threadIdx.x & 127) / 32;
  // Lanes 0 and 1 tell the two CTAs.
  const auto release = [&](int stage) {
    if (lane < 2) arrive_at(empty + stage * 8, lane);
  };
  if constexpr (K::kEightBit && K::kDepthFirst) {
    // Registers of a product may not be written while another is under way (ptxas then puts all in
    // a row): the next stage's pairs come meanwhile, and are taken apart behind it.
    u32 pairs[4][4], fragments[4][4];
    const auto fetch = [&] {
      mbar_wait(full + ring.stage * 8, ring.phase);
      load_pairs(pairs, stages + ring.stage * K::kStageBytes, group * 4 + warp, lane);
    };
    fetch();
#pragma unroll 1
    for (int k = 0; k < a.depth; k += kDepth) {
      take_apart(pairs, fragments, lane);
      const int stage = ring.stage;
      const u64 db = make_descriptor(stages + stage * K::kStageBytes + kBytesWeight);
      MmaHopper::fence();
#pragma unroll
      for (int i = 0; i < 4; ++i)
        wgmma_e4m3(acc, fragments[i], db + (MmaHopper::offset<false>(i) >> 4));
      MmaHopper::commit();
      meanwhile(k);
      ring.next();
      if (k + kDepth < a.depth) fetch();
      MmaHopper::wait<0>();
      pin(fragments);
      release(stage);
    }
  } else {
    int previous = -1;
#pragma unroll 1
    for (int k = 0; k < a.depth; k += kDepth, ring.next()) {
      mbar_wait(full + ring.stage * 8, ring.phase);
      const u32 stage = stages + ring.stage * K::kStageBytes;
      const u64 da = make_descriptor(stage + group * kBlockBytes);
      const u64 db = make_descriptor(stage + kBytesWeight);
      MmaHopper::fence();
#pragma unroll
      for (int i = 0; i < kDepth / 16; ++i) {
        const u64 b = db + (MmaHopper::offset<false>(i) >> 4);
        if constexpr (K::kEightBit) {
          wgmma_e4m3(acc, da + (MmaHopper::offset<false>(i) >> 4), b);
        } else {
          wgmma_ss<K::kDepthFirst, 0>(acc, da + (MmaHopper::offset<K::kDepthFirst>(i) >> 4), b, 1);
        }
      }
      MmaHopper::commit();
      meanwhile(k);
      MmaHopper::wait<1>();
      if (previous >= 0) release(previous);
      previous = ring.stage;
    }
    MmaHopper::wait<0>();
    release(previous);
  }
  pin(acc);
  if (a.depth == kDepth) scales.load(a);
  write_out<K, kColumns>(a, place, acc, scales, out, group, turn);
}

/// Takes the tile with the number of columns that it has, of kColumns and the steps below it.
template <class K, int kColumns>
__device__ __forceinline__ void multiply_any(const Args& a, const Place& place, Ring& ring,
                                             u32 stages, u32 full, u32 empty, u32 out, int group,
                                             int& turn, Upcoming<K>& upcoming) {
  if (columns_of(place) == kColumns) {
    multiply_tile<K, kColumns>(a, place, ring, stages, full, empty, out, group, turn, upcoming);
  } else if constexpr (kColumns > kStep) {
    multiply_any<K, kColumns - kStep>(a, place, ring, stages, full, empty, out, group, turn,
                                      upcoming);
  }
}

template <class K>
__device__ void multiply(const Args& a, const int* table, u32 stages, u32 full, u32 empty, u32 out,
                         int rank) {
  const int group = threadIdx.x / 128 - 1;
  out += group * 2 * K::kOutBytes;
  Ring ring;
  int turn = 0;  // of the two tiles on the way out
  Upcoming<K> upcoming{a, table, rank};
  upcoming.look();
  while (upcoming.is_any) {
    const Place place = upcoming.place;
    multiply_any<K, K::kTokens>(a, place, ring, stages, full, empty, out, group, turn, upcoming);
  }
  if ((threadIdx.x & 127) == 0) bulk_wait_all();
}

#endif

template <class K>
__global__ void __launch_bounds__(kThreads, 1)
    grouped_product_kernel(const __grid_constant__ Args args) {
#if defined(__CUDA_ARCH_FEAT_SM90_ALL)
  // Swizzled tiles begin on 1024 bytes; there is no room to move them.
  extern __shared__ __align__(1024) unsigned char memory[];
  const u32 stages = smem_u32(memory);
  if ((stages & 1023u) != 0) __trap();
  const int rank = static_cast<int>(rank_in_cluster());
  const u32 out = stages + kStages * K::kStageBytes;
  const u32 full = out + 4 * K::kOutBytes, empty = full + kStages * 8;
  int* const table = reinterpret_cast<int*>(memory + (empty + kStages * 8 - stages));
  if (threadIdx.x == 0) {
    for (int s = 0; s < kStages; ++s) {
      mbar_init(full + s * 8, 1);
      mbar_init(empty + s * 8, 16);
    }
    fence_cluster_barriers();
  }
  // The stages are not in use yet.
  K::Tiles::fill(args.ends, args.experts, reinterpret_cast<int*>(memory), table);
  fence_async_proxy();
  cluster_sync();
  if (threadIdx.x < 128) {
    set_max_registers_down<40>();
    if (threadIdx.x == 0) load<K>(args, table, stages, full, empty, rank);
  } else {
    set_max_registers_up<232>();
    multiply<K>(args, table, stages, full, empty, out, rank);
  }
  // Neither leaves while the other still sends to it.
  cluster_sync();
#endif
}

template <class K>
void launch(const GroupedProduct& p, Args& args, cudaStream_t stream) {
  args.y = tensor_map(p.y, p.rows, p.width, p.width, K::kOutRows);
  launch_pairs(grouped_product_kernel<K>, multiprocessors() / 2, kThreads, K::kSharedBytes, stream,
               args);
}

}  // namespace

bool grouped_product_available() { return has_sm90a(); }

void grouped_product(const GroupedProduct& p, cudaStream_t stream) {
  const bool is_eight_bit = p.eight_bit.x_scales != nullptr;
  const int64_t values = is_eight_bit ? 2 : 1;  // in the 2 bytes of an element
  if (p.experts < 1 || p.experts > kMostExperts || p.depth % (kDepth * values) != 0 ||
      p.width % 8 != 0 || (is_eight_bit && p.width % 16 != 0) || p.rows >= int64_t{1} << 28 ||
      p.experts * std::max(p.depth, p.width) >= int64_t{1} << 31) {
    throw std::invalid_argument("grouped_product (cuda): " + std::to_string(p.experts) +
                                " experts, " + std::to_string(p.rows) + " rows, depth " +
                                std::to_string(p.depth) + ", width " + std::to_string(p.width));
  }
  if (p.rows == 0) return;
  const int64_t depth = p.depth / values, width = p.width / values;
  const int box = kDepth * static_cast<int>(values);
  Args args;
  args.weight = p.depth_first ? tensor_map(p.weight, p.experts * p.depth, width, width, box)
                              : tensor_map(p.weight, p.experts * p.width, depth, depth, kFeatures);
  for (int i = 0; i < kMostTokens / kStep; ++i)
    args.tokens[i] = tensor_map(p.x, p.rows, depth, depth, (i + 1) * kStep / 2);
  args.out = static_cast<bf16*>(p.y);
  args.ends = p.ends;
  args.experts = static_cast<int>(p.experts);
  args.width = static_cast<int>(p.width);
  args.depth = static_cast<int>(depth);
  args.feature_pairs = static_cast<int>((p.width + 2 * kFeatures - 1) / (2 * kFeatures));
  args.scales = p.eight_bit;
  const auto start = is_eight_bit
                         ? (p.depth_first ? launch<Kind<true, true>> : launch<Kind<true, false>>)
                         : (p.depth_first ? launch<Kind<false, true>> : launch<Kind<false, false>>);
  start(p, args, stream);
  check_launch("grouped_product");
}

}  // namespace heddle::ops::cuda
