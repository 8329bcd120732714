// Sums of products of up to 64 rows, as one token of a batch of sequences needs them. The time is
// that of reading the matrices once, so these are copied to the multiprocessors by bulk copies that
// begin before the launches that make the rows have ended (dependent_launch.cuh).
//
// A CTA takes 64 columns of one sum a multiplying warpgroup, as the 64 rows of wgmma.m64nNk16, with
// the rows of a as its N columns. The CTAs of a cluster share the depth; each then adds up the sums
// of all of them for its part of the rows, in the order of the CTAs, and does what follows the
// products. SwiGLU: the first half of a tile are columns of gate, the second the same ones of up.
//
// Four more warps apply the norm's weight to the rows in shared memory and add up the rows'
// squares, which give the factor of the finished sums. One warp asks for matrices and rows. With
// low-rank changes two more multiply the rows by A (batch_row_changes.cuh), and all warps multiply
// the lows by B on the way out.
//
// Shared memory: a ring of stages of 64 in depth, columns and rows with the 128-byte swizzle and
// tiles of A, and barriers. full[s]: the bytes of a stage have landed. scaled[s]: its rows are
// multiplied by the norm's weight. empty[s]: all warps that multiply are done with it. The sums lie
// in the place of the ring on the way out. With changes, a table of which rows have which B.
#include "ops/linear/cuda/batch_rows.h"

#include <algorithm>
#include <atomic>
#include <stdexcept>
#include <string>

#include "ops/cuda/reduce.cuh"
#include "ops/cuda/tensor_map.h"
#include "ops/linear/cuda/batch_row_changes.cuh"

namespace heddle::ops::cuda {
namespace {

using namespace batch_row;

#if defined(__CUDA_ARCH_FEAT_SM90_ALL)

/// 4 elements, of which `valid` are there.
__device__ __forceinline__ float4 load_four(const bf16* from, bool is_wide, int valid) {
  if (is_wide && valid >= 4) {
    const uint2 v = __ldcg(reinterpret_cast<const uint2*>(from));
    return {bf16_lo(v.x), bf16_hi(v.x), bf16_lo(v.y), bf16_hi(v.y)};
  }
  const auto at = [&](int i) { return i < valid ? load_value(from, i) : 0.f; };
  return {at(0), at(1), at(2), at(3)};
}

__device__ __forceinline__ void store4(bf16* to, bool is_wide, int valid, const float4& v) {
  if (is_wide && valid >= 4) {
    *reinterpret_cast<uint2*>(to) = make_uint2(pack_bf16(v.x, v.y), pack_bf16(v.z, v.w));
    return;
  }
  const float x[4] = {v.x, v.y, v.z, v.w};
#pragma unroll
  for (int i = 0; i < 4; ++i) {
    if (i < valid) to[i] = __float2bfloat16_rn(x[i]);
  }
}

__device__ __forceinline__ float gated(float gate, float up) {
  const float g = __bfloat162float(__float2bfloat16_rn(gate));
  return g * sigmoid(g) * __bfloat162float(__float2bfloat16_rn(up));
}

/// Four columns of a row, summed over the CTAs that share the depth.
__device__ __forceinline__ float4 total_of(const Work& work, u32 address, float factor) {
  float4 parts[kMostSplit], y = {0, 0, 0, 0};
#pragma unroll
  for (int s = 0; s < kMostSplit; ++s) {
    parts[s] = {0, 0, 0, 0};
    if (s < work.p.split) parts[s] = load4_from(address, s);
  }
#pragma unroll
  for (int s = 0; s < kMostSplit; ++s)
    y.x += parts[s].x, y.y += parts[s].y, y.z += parts[s].z, y.w += parts[s].w;
  // Not together with what is added later: the same products with changes round the same way.
  return {__fmul_rn(y.x, factor), __fmul_rn(y.y, factor), __fmul_rn(y.z, factor),
          __fmul_rn(y.w, factor)};
}

/// The factor that the norm gives a row whose squares lie at `address`.
template <int kRows>
__device__ __forceinline__ float norm_factor(const Work& work, u32 address) {
  float parts[kMostSplit], square = 0;
#pragma unroll
  for (int s = 0; s < kMostSplit; ++s)
    parts[s] =
        s < work.p.split ? load_from(address, s) + load_from(address + kRows * 4, s) : 0;
#pragma unroll
  for (int s = 0; s < kMostSplit; ++s) square += parts[s];
  return rsqrtf(square / work.few.depth + work.few.norm.eps);
}

/// The CTA's rows of the tile: the sums of all CTAs of the cluster and what follows them.
template <int kRows, int kGroups, Changes kChanges>
__device__ __forceinline__ void write_out(const Work& work, u32 base, float* factors) {
  using L = Layout<kRows, kGroups, kChanges>;
  const few_row::Arguments& few = work.few;
  const FewRowSum& sum = work.sum;
  const int split = work.p.split, per = kRows / split, row_base = work.rank * per,
            thread = threadIdx.x;
  const bool is_wide = work.p.is_wide[work.which];
  if (work.is_normed()) {
    if (thread < per)
      factors[thread] = norm_factor<kRows>(work, base + L::kSquares + (row_base + thread) * 4);
    named_sync(2, L::kWriters);
  }
  const int groups = (work.is_gated() ? L::kColumns / 2 : L::kColumns) / 4;  // of four columns
  for (int i = thread; i < per * groups; i += L::kWriters) {
    const int own = i / groups, row = row_base + own, column = i % groups * 4,
              valid = row < few.rows ? sum.columns - work.first - column : 0;
    if (valid <= 0) continue;
    float4 before = {0, 0, 0, 0};
    if (sum.start != nullptr)
      before = load_four(
          static_cast<const bf16*>(sum.start) + row * sum.start_stride + work.first + column,
          is_wide, valid);
    const float factor = work.is_normed() ? factors[own] * sum.scale : sum.scale;
    const auto value = [&](int from) {
      return total_of(work, base + (row * L::kPitch + from) * 4, factor);
    };
    float4 y = value(column);
    if (work.is_gated()) {
      const float4 up = value(column + L::kColumns / 2);
      y = {gated(y.x, up.x), gated(y.y, up.y), gated(y.z, up.z), gated(y.w, up.w)};
    }
    y.x += before.x, y.y += before.y, y.z += before.z, y.w += before.w;
    store4(static_cast<bf16*>(sum.y) + row * sum.y_stride + work.first + column, is_wide, valid, y);
  }
}

/// write_out() with changes of runs.
template <int kRows, int kGroups, Changes kChanges>
__device__ __forceinline__ void write_changed(const Work& work, u32 base,
                                              const ChangeTable& table) {
  using P = Piece<kRows, kGroups, kChanges>;
  const few_row::Arguments& few = work.few;
  const FewRowSum& sum = work.sum;
  const int lane = threadIdx.x % 32, t = lane % 4, per = kRows / work.p.split,
            row_end = min(few.rows, (work.rank + 1) * per);
  const bool is_wide = work.p.is_wide[work.which];
#pragma unroll 1
  for (int i = threadIdx.x / 32; i < P::count(work); i += P::L::kWarps) {
    P piece;
    if (!piece.place(work, i)) continue;
    const int column = work.first + piece.own;
    // Columns of the lane that are there, and what their sums are added to.
    const int valid = sum.columns - column;
    float before[2][P::kLaneColumns] = {};
    if (sum.start != nullptr) {
#pragma unroll
      for (int r = 0; r < 2; ++r) {
        const int row = piece.row + 2 * t + r;
#pragma unroll
        for (int c = 0; c < P::kLaneColumns; ++c) {
          if (row < row_end && c < valid)
            before[r][c] = load_value(sum.start, row * sum.start_stride + column + c);
        }
      }
    }
    float totals[P::kHalves][4] = {}, square = 0;
#pragma unroll 1
    for (int from = piece.row; from < min(piece.row + 8, kRows); from = piece.next) {
      piece.fetch(work, table, from);
      if (!piece.is_deep) {
        piece.sum(work, base, table, from, totals, square);
        continue;
      }
      const PieceSums deep =
          P::deep_sum(work.p, work.which, work.first, work.rank, base, table, piece.row, piece.own,
                      from, min(piece.next, min(piece.row + 8, kRows)));
      square = deep.square;
#pragma unroll
      for (int h = 0; h < P::kHalves; ++h) {
#pragma unroll
        for (int n = 0; n < 4; ++n) totals[h][n] += deep.totals[h][n];
      }
    }
    const float of_line =
        work.is_normed() ? rsqrtf(square / few.depth + few.norm.eps) * sum.scale : sum.scale;
#pragma unroll
    for (int r = 0; r < 2; ++r) {
      const float factor = __shfl_sync(0xffffffffu, of_line, (2 * t + r) * 4);
      const int row = piece.row + 2 * t + r;
      float y[P::kLaneColumns];
#pragma unroll
      for (int c = 0; c < P::kLaneColumns; ++c) {
        y[c] = __fmul_rn(totals[0][c * 2 + r], factor);
        if constexpr (P::kIsGated) y[c] = gated(y[c], __fmul_rn(totals[1][c * 2 + r], factor));
        y[c] += before[r][c];
      }
      if (row >= row_end) continue;
      bf16* const to = static_cast<bf16*>(sum.y) + row * sum.y_stride + column;
      if (is_wide && valid >= P::kLaneColumns) {
#pragma unroll
        for (int c = 0; c < P::kLaneColumns; c += 2)
          *reinterpret_cast<u32*>(to + c) = pack_bf16(y[c], y[c + 1]);
      } else {
#pragma unroll
        for (int c = 0; c < P::kLaneColumns; ++c) {
          if (c < valid) to[c] = __float2bfloat16_rn(y[c]);
        }
      }
    }
  }
}

#endif

template <int kRows, int kGroups, Changes kChanges>
__global__ void __launch_bounds__(Layout<kRows, kGroups, kChanges>::kThreads,
                                  Layout<kRows, kGroups, kChanges>::kResident)
    batch_rows_kernel(const __grid_constant__ Arguments p) {
#if defined(__CUDA_ARCH_FEAT_SM90_ALL)
  using L = Layout<kRows, kGroups, kChanges>;
  extern __shared__ unsigned char memory[];
  let_next_begin();
  const Ring<kRows, kGroups, kChanges> ring{(smem_u32(memory) + 1023) & ~1023u};
  unsigned char* const own = memory + (ring.base - smem_u32(memory));
  const auto floats = [&](u32 at) { return reinterpret_cast<float*>(own + at); };
  const few_row::Arguments& few = p.few;
  const int rank = static_cast<int>(rank_in_cluster()), warp = threadIdx.x / 32,
            tile = static_cast<int>(blockIdx.x) / p.split;
  int which = 0;
  while (which + 1 < few.count && tile >= few.first_block[which + 1]) ++which;
  const FewRowSum& sum = few.sums[which];
  const int all = (few.depth + kDepth - 1) / kDepth, begin = all * rank / p.split,
            columns = sum.up != nullptr ? L::kColumns / 2 : L::kColumns;
  const Work work{p,
                  few,
                  sum,
                  which,
                  (tile - few.first_block[which]) * columns,
                  begin,
                  all * (rank + 1) / p.split - begin,
                  rank};
  ChangeTable& table = *reinterpret_cast<ChangeTable*>(own + L::kTable);
  if (threadIdx.x == 0) ring.init();
  __syncthreads();
  if (warp == L::kLoader) {
    if (threadIdx.x % 32 == 0) load(work, ring);
    __syncwarp();
  } else if (warp < kGroups * 4) {
    multiply(work, ring, floats(0));
  } else if (warp < L::kLoader) {
    wait_for_previous();
    if (work.is_normed()) scale(work, ring, floats(L::kSquares));
  } else if constexpr (L::kHasRuns) {
    if (warp < L::kClerk) {
      make_lows_of_runs(work, ring, warp - L::kLow);
    } else {
      fill_table<kRows, L::kColumns>(work, table);
      wait_for_previous();
      wait_for_lows_of_runs(work);
    }
  } else if constexpr (L::kIsChanged) {
    make_lows_of_one_set(work, ring, warp - L::kLow,
                         reinterpret_cast<bf16*>(own + L::kFactorTiles));
  }
  if constexpr (L::kHasRuns) {
    cluster_sync();
    write_changed<kRows, kGroups, kChanges>(work, ring.base, table);
  } else {
    cluster_sync();
    if (warp < L::kLoader) write_out<kRows, kGroups, kChanges>(work, ring.base, floats(L::kFactors));
  }
  cluster_sync();  // until nobody reads this CTA's sums any more
#endif
}

/// Clusters that the device holds at once.
template <class Kernel>
int resident_of(const Kernel& kernel, const cudaLaunchConfig_t& config) {
  int clusters = 0;
  if (cudaOccupancyMaxActiveClusters(&clusters, kernel, &config) != cudaSuccess || clusters < 1)
    throw std::runtime_error("batch_row_sums: the device holds no cluster of the kernel");
  return clusters;
}

template <int kRows, int kGroups, Changes kChanges>
void launch(Arguments& p, cudaStream_t stream) {
  using L = Layout<kRows, kGroups, kChanges>;
  constexpr int kBytes = L::kBytes + 1024;
  const auto kernel = batch_rows_kernel<kRows, kGroups, kChanges>;
  cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, kBytes);
  cudaStreamCaptureStatus status = cudaStreamCaptureStatusNone;
  cudaStreamIsCapturing(stream, &status);
  cudaLaunchAttribute attributes[2] = {};
  attributes[0].id = cudaLaunchAttributeClusterDimension;
  attributes[0].val.clusterDim = {static_cast<unsigned>(p.split), 1, 1};
  attributes[1].id = cudaLaunchAttributeProgrammaticStreamSerialization;
  attributes[1].val.programmaticStreamSerializationAllowed = 1;
  cudaLaunchConfig_t config{};
  config.gridDim = dim3(static_cast<unsigned>(p.few.first_block[p.few.count] * p.split));
  config.blockDim = dim3(L::kThreads);
  config.dynamicSmemBytes = kBytes;
  config.stream = stream;
  config.attrs = attributes;
  config.numAttrs = 1;
  if (L::kHasRuns) {
    static std::atomic<int> residents[kMostSplit + 1] = {};
    int resident = residents[p.split];
    if (resident == 0) residents[p.split] = resident = resident_of(kernel, config);
    p.few.makers = std::min(static_cast<int>(config.gridDim.x) / p.split, resident);
  }
  config.numAttrs = status == cudaStreamCaptureStatusActive ? 2 : 1;
  cudaLaunchKernelEx(&config, kernel, p);
}

template <Changes kChanges, int kGroups>
void launch(Arguments& p, cudaStream_t stream) {
  p.few.rows <= 32 ? launch<32, kGroups, kChanges>(p, stream)
                   : launch<64, kGroups, kChanges>(p, stream);
}

template <Changes kChanges>
void launch_wide(Arguments& p, int groups, cudaStream_t stream) {
  groups == 2 ? launch<kChanges, 2>(p, stream) : launch<kChanges, 3>(p, stream);
}

template <Changes kChanges>
void launch(Arguments& p, int groups, cudaStream_t stream) {
  groups == 1 ? launch<kChanges, 1>(p, stream) : launch_wide<kChanges>(p, groups, stream);
}

int tiles_of(const std::vector<FewRowSum>& sums, int groups) {
  int tiles = 0;
  for (const FewRowSum& sum : sums) {
    const int columns = groups * kGroupColumns / (sum.up != nullptr ? 2 : 1);
    tiles += (sum.columns + columns - 1) / columns;
  }
  return tiles;
}

/// How the work of a launch is cut.
struct Cut {
  int groups;  ///< Groups of 64 columns that make a tile.
  int split;   ///< CTAs that share the depth of a tile.
};

/// CTAs are up to 1.5 a multiprocessor, which has room for two, of which one is for the next
/// launch's; one where tiles are so wide that it has room for one. Each has no less than 4 blocks
/// of the depth. Narrow tiles where wide ones are few; the widest where others are so many that
/// some multiprocessors would get two and all wait for these. It does not depend on changes: lows
/// are summed by the parts of the depth.
Cut cut_of(const std::vector<FewRowSum>& sums) {
  const int all = multiprocessors(), steps = (sums[0].terms[0].depth + kDepth - 1) / kDepth;
  Cut cut{2, 1};
  if (tiles_of(sums, 2) > all)
    cut.groups = 3;
  else if (sums[0].up == nullptr && tiles_of(sums, 1) * 8 <= all * 3)
    cut.groups = 1;
  const int tiles = tiles_of(sums, cut.groups), most = cut.groups > 2 ? all : all * 3 / 2;
  while (cut.split < kMostSplit && tiles * cut.split * 2 <= most && steps >= cut.split * 8)
    cut.split *= 2;
  return cut;
}

bool is_on_8_bytes(const void* data, int64_t stride) {
  return reinterpret_cast<uintptr_t>(data) % 8 == 0 && stride % 4 == 0;
}

}  // namespace

bool batch_rows_available() { return has_sm90a(); }

bool batch_rows_are_faster(int rows, const std::vector<FewRowSum>& sums, bool has_changes) {
  // few_rows holds more CTAs, each of fewer columns: it begins sooner and reads more slowly, with
  // more than 8 rows much more so. Each of its CTAs reads all of A.
  constexpr int64_t kMegabyte = 1'000'000;
  int64_t bytes = 0;
  for (const FewRowSum& sum : sums)
    bytes += int64_t{2} * sum.columns * sum.terms[0].depth * (sum.up != nullptr ? 2 : 1);
  const bool are_many = rows > kMostFewRows / 2;
  const int most = has_changes ? (are_many ? 6 : 9) : (are_many ? 8 : 12);
  return rows > kMostFewRows || bytes > most * kMegabyte;
}

void batch_row_sums(int rows, const std::vector<FewRowSum>& sums, cudaStream_t stream,
                    const FewRowNorm& norm, const FewRowSlots& slots) {
  if (rows < 1 || rows > kMostBatchRows || sums.empty() || sums.size() > kMostFewRowSums ||
      slots.count > kMostRuns)
    throw std::invalid_argument("batch_row_sums: too many rows, sums or runs, or none");
  Arguments p{};
  few_row::Arguments& few = p.few;
  const FewRowTerm& input = sums[0].terms[0];
  few.count = static_cast<int>(sums.size());
  few.rows = rows;
  few.depth = input.depth;
  few.x = input.a;
  few.x_stride = input.a_stride;
  few.norm = norm;
  few.slots = slots;
  for (int i = 0; i < few.count; ++i) few.sums[i] = sums[static_cast<std::size_t>(i)];
  const int runs = slots.runs != nullptr ? slots.count : kMostBatchRows / kMostSlotRows;
  few.low_blocks = few.add_lows() * runs;
  const Cut cut = cut_of(sums);
  int tiles = 0, maps = 0;
  for (int i = 0; i < few.count; ++i) {
    const FewRowSum& sum = few.sums[i];
    const FewRowTerm& term = sum.terms[0];
    if (sum.term_count != 1 || term.a != input.a || term.depth != input.depth)
      throw std::invalid_argument("batch_row_sums: sums of several terms, or of other rows");
    const bool is_gated = sum.up != nullptr;
    if (maps + (is_gated ? 2 : 1) > kMostFewRowSums + 1)
      throw std::invalid_argument("batch_row_sums: too many matrices");
    p.map_of[i] = maps;
    p.is_wide[i] = is_on_8_bytes(sum.y, sum.y_stride) && is_on_8_bytes(sum.start, sum.start_stride);
    for (const void* matrix : {term.b, sum.up}) {
      if (matrix != nullptr)
        p.maps[maps++] = tensor_map(matrix, sum.columns, term.depth, term.b_stride,
                                    cut.groups * kGroupColumns / (is_gated ? 2 : 1));
    }
    few.first_block[i] = tiles;
    tiles += tiles_of({sum}, cut.groups);
  }
  few.first_block[few.count] = tiles;
  const int kept_rows = rows <= 32 ? 32 : 64;
  p.rows_map = tensor_map(input.a, rows, input.depth, input.a_stride, kept_rows);
  p.split = cut.split;
  const bool has_runs = few.low_blocks > 0 && !few.has_one_set();
  if (has_runs) few.counters = few_row::next_counters();
  if (few.low_blocks == 0)
    launch<Changes::kNone>(p, cut.groups, stream);
  else if (few.has_gates())
    has_runs ? launch_wide<Changes::kRunsGated>(p, cut.groups, stream)
             : launch_wide<Changes::kOneSetGated>(p, cut.groups, stream);
  else
    has_runs ? launch<Changes::kRuns>(p, cut.groups, stream)
             : launch<Changes::kOneSet>(p, cut.groups, stream);
  check_launch("batch_row_sums");
}

}  // namespace heddle::ops::cuda
