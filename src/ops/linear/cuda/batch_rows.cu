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
// squares, which give the factor of the finished sums. One thread asks for matrices and rows. With
// low-rank changes eight more warps make those of the CTA's part of the rows meanwhile
// (batch_row_changes.cuh), and CTAs beyond the tiles' make lows alone.
//
// Shared memory: a ring of stages of 64 in depth, columns and rows with the 128-byte swizzle, and
// barriers. full[s]: the bytes of a stage have landed. scaled[s]: its rows are multiplied by the
// norm's weight. empty[s]: all multiplying warps are done with it. The sums lie in the place of the
// ring on the way out.
#include "ops/linear/cuda/batch_rows.h"

#include <algorithm>
#include <atomic>
#include <stdexcept>
#include <string>

#include "ops/cuda/reduce.cuh"
#include "ops/cuda/tensor_map.h"
#include "ops/linear/cuda/batch_row_exchange.h"
#include "ops/linear/cuda/batch_row_parts.cuh"

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
__device__ __forceinline__ float4 total_of(const Work& work, u32 address) {
  float4 parts[kMostSplit], y = {0, 0, 0, 0};
#pragma unroll
  for (int s = 0; s < kMostSplit; ++s) {
    parts[s] = {0, 0, 0, 0};
    if (s < work.p.split) parts[s] = load4_from(address, s);
  }
#pragma unroll
  for (int s = 0; s < kMostSplit; ++s)
    y.x += parts[s].x, y.y += parts[s].y, y.z += parts[s].z, y.w += parts[s].w;
  return y;
}

/// The CTA's rows of the tile: the sums of all CTAs of the cluster and what follows them. `changes`
/// [kRows / split, kPitch]: those of the sums, if L::kIsChanged.
template <int kRows, int kGroups, Changes kChanges>
__device__ __forceinline__ void write_out(const Work& work, u32 base, float* factors,
                                          const float* changes) {
  using L = Layout<kRows, kGroups, kChanges>;
  const few_row::Arguments& few = work.few;
  const FewRowSum& sum = work.sum;
  const int split = work.p.split, per = kRows / split, row_base = work.rank * per,
            thread = threadIdx.x;
  const bool is_normed = few.norm.weight != nullptr, is_wide = work.p.is_wide[work.which],
             is_pair = work.p.twins[work.which].y != nullptr;
  if (is_normed) {
    if (thread < per) {
      const u32 at = base + L::kSquares + (row_base + thread) * 4;
      float parts[kMostSplit], square = 0;
#pragma unroll
      for (int s = 0; s < kMostSplit; ++s)
        parts[s] = s < split ? load_from(at, s) +
                                   (L::kScaling < kScalers ? load_from(at + kRows * 4, s) : 0.f)
                             : 0;
#pragma unroll
      for (int s = 0; s < kMostSplit; ++s) square += parts[s];
      factors[thread] = rsqrtf(square / few.depth + few.norm.eps);
    }
    named_sync(2, L::kWriters);
  }
  const int groups = work.columns / 4;  // of four columns
  for (int i = thread; i < per * groups; i += L::kWriters) {
    const int own = i / groups, row = row_base + own, column = i % groups * 4,
              valid = row < few.rows ? sum.columns - work.first - column : 0;
    if (valid <= 0) continue;
    float4 before = {0, 0, 0, 0};
    if (sum.start != nullptr)
      before = load_four(
          static_cast<const bf16*>(sum.start) + row * sum.start_stride + work.first + column,
          is_wide, valid);
    const float factor = is_normed ? factors[own] : 1.f;
    const auto value = [&](int from) {
      float4 y = total_of(work, base + (row * L::kPitch + from) * 4);
      if constexpr (L::kIsChanged) {
        const float4 change = *reinterpret_cast<const float4*>(changes + own * L::kPitch + from);
        y.x += change.x, y.y += change.y, y.z += change.z, y.w += change.w;
      }
      return float4{y.x * factor * sum.scale, y.y * factor * sum.scale, y.z * factor * sum.scale,
                    y.w * factor * sum.scale};
    };
    float4 y = value(column);
    if (is_pair) {
      const Twin& twin = work.p.twins[work.which];
      store4(static_cast<bf16*>(twin.y) + row * twin.y_stride + work.first + column, is_wide, valid,
             value(column + work.columns));
    } else if (work.has_halves()) {
      const float4 up = value(column + work.columns);
      y = {gated(y.x, up.x), gated(y.y, up.y), gated(y.z, up.z), gated(y.w, up.w)};
    }
    y.x += before.x, y.y += before.y, y.z += before.z, y.w += before.w;
    store4(static_cast<bf16*>(sum.y) + row * sum.y_stride + work.first + column, is_wide, valid, y);
  }
}

__device__ __forceinline__ Work work_of(const Arguments& p) {
  const few_row::Arguments& few = p.few;
  const int rank = static_cast<int>(rank_in_cluster()),
            tile = static_cast<int>(blockIdx.x) / p.split;
  int which = 0;
  while (which + 1 < few.count && tile >= few.first_block[which + 1]) ++which;
  const FewRowSum& sum = few.sums[which];
  const int all = (few.depth + kDepth - 1) / kDepth, begin = all * rank / p.split,
            columns = sum.up != nullptr ? p.columns / 2 : p.columns;
  return {p,       few,
          sum,     which,
          columns, (tile - few.first_block[which]) * columns,
          begin,   all * (rank + 1) / p.split - begin,
          rank};
}

template <int kRows, int kGroups, Changes kChanges>
__device__ __forceinline__ auto changed_of(const Work& work) {
  using L = Layout<kRows, kGroups, kChanges>;
  const int per = kRows / work.p.split;
  return typename L::Changed{{{work.few, work.p.lows},
                              work.sum,
                              work.which,
                              work.first,
                              work.columns,
                              work.rank * per,
                              per}};
}

/// All that the changing warps do. They ask for A before they look at anything else, as each line
/// of the arguments that a CTA reads first is a read from the L2.
template <int kRows, int kGroups, Changes kChanges>
__device__ __forceinline__ void change(const Arguments& p, int thread,
                                       typename Layout<kRows, kGroups, kChanges>::Shared& shared,
                                       float* sums) {
  using L = Layout<kRows, kGroups, kChanges>;
  take_registers<L>();
  using Maker = LowMaker<L::kLowSteps>;
  typename Maker::FirstPart part;
  const Maker maker{p.few, p.lows};
  maker.fetch_first(thread, part);
  const Work work = work_of(p);
  const auto changed = changed_of<kRows, kGroups, kChanges>(work);
  changed.make(thread, part, shared, L::kWriters, maker.makes_alone(), sums);
  if (maker.makes_alone()) {
    if (thread == 0) changed.leave();
    return;
  }
  p.split > 1 ? cluster_sync() : __syncthreads();
  if (thread == 0) changed.leave();
  if (p.split > 1) leave_cluster();
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
  auto& shared = *reinterpret_cast<typename L::Shared*>(own + L::kShared);
  const int changer = static_cast<int>(threadIdx.x) - L::kFirstChanger, warp = threadIdx.x / 32,
            lister = static_cast<int>(threadIdx.x) - kGroups * 128,
            loader = static_cast<int>(threadIdx.x) - (L::kHasLoader ? L::kWriters : 0);
  if constexpr (L::kIsChanged) {
    if (changer >= 0) {
      change<kRows, kGroups, kChanges>(p, changer, shared, floats(L::kChangeSums));
      return;
    }
    give_registers<L>();
  }
  if (threadIdx.x == 0) {
    if constexpr (L::kIsChanged) shared.begin();
    ring.init();  // its fence is for all barriers
  }
  const Work work = work_of(p);
  const typename L::Changed changed = changed_of<kRows, kGroups, kChanges>(work);
  typename L::Changed::Found found;
  if constexpr (L::kIsChanged) {
    if (changed.makes_alone()) return;
    if (lister >= 0 && lister < L::Changed::kListers) found = changed.look_at_job(lister);
    named_sync(7, L::kFirstChanger);
    if (warp == (L::kHasLoader ? L::kWriters / 32 : 0)) changed.say_begun();
  } else {
    __syncthreads();
  }
  // Blocks are asked for by a thread of a warp that does nothing else, or of the first warp.
  const int before = L::kIsChanged ? min(work.steps, kBeforeLows) : 0;
  const auto wait_and_load = [&] {
    if constexpr (L::kIsChanged) changed.wait_for_first_part();
    if (loader == 0) load_first(work, ring, before, L::kIsChanged ? smem_u32(&shared.released) : 0);
    __syncwarp();
  };
  if (loader == 0) {
    for (int i = 0; i < before; ++i) load_matrix(work, ring, i);
  }
  __syncwarp();
  if (L::kHasLoader && loader >= 0) {
    wait_and_load();
    for (int i = L::kStages; loader == 0 && i < work.steps; ++i) load_next(work, ring, i);
    __syncwarp();
  } else {
    if constexpr (L::kIsChanged) {
      lister >= 0 ? changed.list(lister, found, shared)
                  : changed.clear(threadIdx.x, kGroups * 128, floats(L::kChangeSums));
      changed.begin_changes(L::kWriters);
      if (!L::kHasLoader && warp == 0)
        wait_and_load();
      else if (lister < 0)
        changed.ask_for_part(L::kHasLoader ? warp + 1 : warp);
    }
    wait_for_previous();
    if (warp < kGroups * 4)
      multiply(work, ring, floats(0));
    else if (work.few.norm.weight != nullptr)
      scale(work, ring, floats(L::kSquares));
  }
  p.split > 1 ? cluster_sync() : __syncthreads();
  if (threadIdx.x < L::kWriters)
    write_out<kRows, kGroups, kChanges>(work, ring.base, floats(L::kFactors),
                                        floats(L::kChangeSums));
  if (p.split > 1) leave_cluster();  // nobody reads this CTA's sums any more
#endif
}

/// CTAs that the device holds at once, in clusters of config's.
template <class Kernel>
int resident_of(const Kernel& kernel, const cudaLaunchConfig_t& config, int split) {
  int clusters = 0;
  if (cudaOccupancyMaxActiveClusters(&clusters, kernel, &config) != cudaSuccess || clusters < 1)
    throw std::runtime_error("batch_row_sums: the device holds no cluster of the kernel");
  return clusters * split;
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
  if (L::kIsChanged) {
    static std::atomic<int> residents[kMostSplit + 1] = {};
    int resident = residents[p.split];
    if (resident == 0) residents[p.split] = resident = resident_of(kernel, config, p.split);
    // Where CTAs are fewer than parts of the lows and than the device holds, more make lows alone.
    const int all = p.lows.tiles = static_cast<int>(config.gridDim.x);
    const int more = std::min(p.lows.count, resident) - all;
    if (more > 0) config.gridDim.x += static_cast<unsigned>(more / p.split * p.split);
    p.lows.makers = std::min(static_cast<int>(config.gridDim.x), resident);
  }
  config.numAttrs = status == cudaStreamCaptureStatusActive ? 2 : 1;
  cudaLaunchKernelEx(&config, kernel, p);
}

template <int kRows>
void launch(Arguments& p, int groups, bool is_changed, cudaStream_t stream) {
  constexpr Changes kNone = Changes::kNone, kShallow = Changes::kShallow, kDeep = Changes::kDeep;
  if (groups == 1)
    is_changed ? launch<kRows, 1, kDeep>(p, stream) : launch<kRows, 1, kNone>(p, stream);
  else if (groups == 3 && is_changed && p.split > 1)
    launch<kRows, 3, kShallow>(p, stream);
  else if (groups == 3)
    is_changed ? launch<kRows, 3, kDeep>(p, stream) : launch<kRows, 3, kNone>(p, stream);
  else if (!is_changed)
    launch<kRows, 2, kNone>(p, stream);
  else
    p.split > 1 ? launch<kRows, 2, kShallow>(p, stream) : launch<kRows, 2, kDeep>(p, stream);
}

/// `columns`: of a tile.
int tiles_of(const std::vector<FewRowSum>& sums, int columns) {
  int tiles = 0;
  for (const FewRowSum& sum : sums) {
    const int own = columns / (sum.up != nullptr ? 2 : 1);
    tiles += (sum.columns + own - 1) / own;
  }
  return tiles;
}

bool is_on_8_bytes(const void* data, int64_t stride) {
  return reinterpret_cast<uintptr_t>(data) % 8 == 0 && stride % 4 == 0;
}

/// Two narrow sums become the halves of one, as a tile costs the same whatever columns it has.
/// twins: the second one's outputs.
std::vector<FewRowSum> paired(const std::vector<FewRowSum>& sums, Twin (&twins)[kMostFewRowSums]) {
  std::vector<FewRowSum> all;
  for (std::size_t i = 0; i < sums.size(); ++i) {
    FewRowSum one = sums[i];
    if (i + 1 < sums.size()) {
      const FewRowSum& other = sums[i + 1];
      if (one.columns <= kGroupColumns / 2 && other.columns == one.columns && one.up == nullptr &&
          other.up == nullptr && one.start == nullptr && other.start == nullptr &&
          one.scale == other.scale && one.terms[0].b_stride == other.terms[0].b_stride &&
          is_on_8_bytes(one.y, one.y_stride) == is_on_8_bytes(other.y, other.y_stride)) {
        one.up = other.terms[0].b;
        one.up_change = other.change;
        twins[all.size()] = {other.y, other.y_stride};
        ++i;
      }
    }
    all.push_back(one);
  }
  return all;
}

/// How the work of a launch is cut.
struct Cut {
  int columns;  ///< Of a tile.
  int split;    ///< CTAs that share the depth of a tile.
  int groups() const { return (columns + kGroupColumns - 1) / kGroupColumns; }
};

/// CTAs are up to 1.5 a multiprocessor, which has room for two, of which one is for the next
/// launch's; one where tiles are so wide, or changes so large, that it has room for one, and not
/// all of them if clusters are large. Each has no less than 4 blocks of the depth. Narrow tiles
/// where wide ones are few; the widest where others are so many that some multiprocessors would get
/// two and all wait for these.
Cut cut_of(const std::vector<FewRowSum>& sums, bool is_changed) {
  constexpr int kWide = 3 * kGroupColumns, kUsual = 2 * kGroupColumns;
  const int all = multiprocessors(), steps = (sums[0].terms[0].depth + kDepth - 1) / kDepth;
  // The widest that share the depth on nearly all multiprocessors, each with 16 blocks or more:
  Cut cut{kWide, 1};
  const int widest = tiles_of(sums, kWide);
  while (cut.split < kMostSplit && widest * cut.split * 2 <= (cut.split > 1 ? all * 7 / 8 : all))
    cut.split *= 2;
  if (cut.split == 1 || steps < cut.split * 16 || widest * cut.split * 4 < all * 3) {
    cut = {kUsual, 1};
    if (tiles_of(sums, kUsual) > all)
      cut.columns = kWide;
    else if (tiles_of(sums, kGroupColumns) * 8 <= all * 3 &&
             std::all_of(sums.begin(), sums.end(),
                         [](const auto& sum) { return sum.up == nullptr; }))
      cut.columns = kGroupColumns;
    const int tiles = tiles_of(sums, cut.columns),
              most = cut.columns == kWide ? all
                     : !is_changed        ? all * 3 / 2
                                          : (cut.columns == kUsual ? all : all * 3 / 4);
    while (cut.split < kMostSplit && tiles * cut.split * 2 <= most && steps >= cut.split * 8)
      cut.split *= 2;
  }
  // Of wide tiles that go over all of the depth each multiprocessor gets as few columns as it can.
  // With changes those that are left without make lows, and begin the next launch.
  constexpr int kStep = 16;
  while (!is_changed && cut.split == 1 && cut.columns - kStep > kUsual &&
         tiles_of(sums, cut.columns - kStep) <= all)
    cut.columns -= kStep;
  return cut;
}

}  // namespace

bool batch_rows_available() { return has_sm90a(); }

bool batch_rows_are_faster(int rows, const std::vector<FewRowSum>& sums) {
  // few_rows holds more CTAs, each of fewer columns: it begins sooner and reads more slowly, with
  // more than 8 rows much more so.
  constexpr int64_t kMegabyte = 1'000'000;
  int64_t bytes = 0;
  for (const FewRowSum& sum : sums)
    bytes += int64_t{2} * sum.columns * sum.terms[0].depth * (sum.up != nullptr ? 2 : 1);
  return rows > kMostFewRows || bytes > (rows > kMostFewRows / 2 ? 8 : 12) * kMegabyte;
}

void batch_row_sums(int rows, const std::vector<FewRowSum>& given, cudaStream_t stream,
                    const FewRowNorm& norm, const FewRowSlots& slots) {
  if (rows < 1 || rows > kMostBatchRows || given.empty() || given.size() > kMostFewRowSums ||
      slots.count > kMostRuns)
    throw std::invalid_argument("batch_row_sums: too many rows, sums or runs, or none");
  for (const FewRowSum& sum : given) {
    const FewRowTerm &term = sum.terms[0], &first = given[0].terms[0];
    if (sum.term_count != 1 || term.a != first.a || term.depth != first.depth)
      throw std::invalid_argument("batch_row_sums: sums of several terms, or of other rows");
  }
  Arguments p{};
  const std::vector<FewRowSum> sums = paired(given, p.twins);
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
  const int runs = slots.runs != nullptr ? slots.count : kMostRuns / 8,
            tiles_of_lows = few.add_lows();
  few.low_blocks = tiles_of_lows * runs;
  const bool is_changed = few.low_blocks > 0;
  const Cut cut = cut_of(sums, is_changed);
  const int part_depth = steps_of_part(cut.groups()) * kStepDepth,
            depths = (few.depth + part_depth - 1) / part_depth;
  int tiles = 0, maps = 0;
  for (int i = 0; i < few.count; ++i) {
    const FewRowSum& sum = few.sums[i];
    const FewRowTerm& term = sum.terms[0];
    const bool has_halves = sum.up != nullptr;
    if (maps + (has_halves ? 2 : 1) > kMostFewRowSums + 1)
      throw std::invalid_argument("batch_row_sums: too many matrices");
    p.map_of[i] = maps;
    p.is_wide[i] = is_on_8_bytes(sum.y, sum.y_stride) && is_on_8_bytes(sum.start, sum.start_stride);
    for (const void* matrix : {term.b, sum.up}) {
      if (matrix != nullptr)
        p.maps[maps++] = tensor_map(matrix, sum.columns, term.depth, term.b_stride,
                                    cut.columns / (has_halves ? 2 : 1));
    }
    few.first_block[i] = tiles;
    tiles += tiles_of({sum}, cut.columns);
  }
  few.first_block[few.count] = tiles;
  const int kept_rows = rows <= 32 ? 32 : 64;
  p.rows_map = tensor_map(input.a, rows, input.depth, input.a_stride, kept_rows);
  p.columns = cut.columns;
  p.split = cut.split;
  if (is_changed) {
    const Exchange exchange =
        exchange_of(stream, int64_t{tiles_of_lows} * depths * kMostBatchRows * kRanks);
    LowParts& lows = p.lows;
    lows.table = slots.runs;
    lows.low_count = few.low_count;
    lows.low_blocks = few.low_blocks;
    lows.depth = few.depth;
    lows.sets = slots.sets;
    for (int i = 0; i < few.low_count; ++i) {
      const FewRowSum& sum = few.sums[few.low_change[i] / 2];
      lows.first_low[i] = few.first_low[i];
      lows.slots[i] = (few.low_change[i] % 2 == 1 ? sum.up_change : sum.change).slots;
    }
    lows.runs = runs;
    lows.depths = depths;
    lows.count = few.low_blocks * depths;
    lows.x = few.x;
    lows.x_stride = few.x_stride;
    lows.norm = norm;
    lows.words = exchange.words;
    lows.counter = exchange.counter;
  }
  if (rows <= 32)
    launch<32>(p, cut.groups(), is_changed, stream);
  else
    launch<64>(p, cut.groups(), is_changed, stream);
  check_launch("batch_row_sums");
}

}  // namespace heddle::ops::cuda
