// Sums of products of a few rows, as one token of a few sequences needs them. The time is that of
// reading the matrices once. A CTA takes kColumns columns of one sum and its warps share the depth
// in blocks of kDepth; several blocks are under way. The products are mma.m16n8k16 with the columns
// of b as its 16 and the rows of a as its 8, so that up to 16 rows cost no more arithmetic than
// reading time. Which element of the depth goes to which lane is free as long as both operands
// agree: a lane reads 8 in a row, 16 bytes, of two columns and of a row. The warps' sums meet in
// shared memory in their order: a column's bits depend on neither the other columns nor the number
// of rows.
//
// b is a weight in every call: a launch of a recording reads it before it waits for the launches
// that make a (dependent_launch.cuh).
//
// All sums of a call share the launch: at these sizes a launch costs as much as the reading. For
// the same reason the launch takes in what stands before and after the products:
// - The norm of a: its weight is applied while a is read, and the rows' squares, which the warps
//   see anyway, give the factor of the finished sum.
// - SwiGLU: the low 8 of a CTA's 16 columns are columns of gate, the high 8 the same ones of up.
// - Low-rank changes: x A^T is a launch of its own, beside which this one runs. That one lets this
//   one begin when the rows x are there, so this one reads x at once and waits for the other only
//   before it multiplies by B.
//
// On-chip memory of a CTA: the sums of its warps, 16 x 8 floats each for every 8 rows, and their
// squares. With changes: the outputs of two.
#include "ops/linear/cuda/few_rows.h"

#include <algorithm>
#include <stdexcept>

#include "ops/cuda/dependent_launch.cuh"
#include "ops/cuda/mma.cuh"
#include "ops/cuda/reduce.cuh"
#include "ops/cuda/vector.cuh"

namespace heddle::ops::cuda {
namespace {

constexpr int kColumns = 16, kDepth = 32, kAhead = 4;

struct Arguments {
  FewRowSum sums[kMostFewRowSums];
  int first_block[kMostFewRowSums];
  int count, rows;
  FewRowNorm norm;
  FewRowOrder order;
};

using Vector = Packed<bf16, 8>;

/// Adds the products of a block of the depth: 8 columns each of low and high, 8 rows a tile.
template <int kTiles>
__device__ __forceinline__ void multiply(float (&total)[kTiles][4], const Vector& low,
                                         const Vector& high, const Vector (&a)[kTiles]) {
#pragma unroll
  for (int r = 0; r < kTiles; ++r) {
#pragma unroll
    for (int half = 0; half < 4; half += 2) {
      const u32 columns[4] = {low.words[half], high.words[half], low.words[half + 1],
                              high.words[half + 1]};
      mma_bf16(total[r], columns, a[r].words[half], a[r].words[half + 1]);
    }
  }
}

/// Sums of a warp, by row and column.
template <int kTiles>
__device__ __forceinline__ void put(float (&to)[kTiles][8][kColumns],
                                    const float (&total)[kTiles][4]) {
  const int lane = threadIdx.x % 32;
#pragma unroll
  for (int r = 0; r < kTiles; ++r) {
#pragma unroll
    for (int i = 0; i < 4; ++i) to[r][lane % 4 * 2 + i % 2][lane / 4 + i / 2 * 8] = total[r][i];
  }
}

/// Multiplies 8 elements of each row by the norm's scale, and adds their squares.
template <int kTiles>
__device__ __forceinline__ void apply_norm(const FewRowNorm& norm, int column, Vector (&a)[kTiles],
                                           float (&squares)[kTiles]) {
  float weight[8];
  read_weight(norm.weight, norm.weight_type, column, weight);
#pragma unroll
  for (int r = 0; r < kTiles; ++r) {
    float x[8];
    unpack(a[r], x);
#pragma unroll
    for (int i = 0; i < 8; ++i) squares[r] += x[i] * x[i], x[i] *= norm.offset + weight[i];
    a[r] = pack<bf16>(x);
  }
}

template <int kTiles, int kWarps, bool kIsChanged>
struct Shared {
  float sums[kWarps][kTiles][8][kColumns];
  float squares[kWarps][kTiles][8];
  static constexpr int kChanges = kIsChanged ? 2 : 1;  // one element that is not used
  float changes[kChanges][kTiles][8][kColumns];
};

/// Rows may have been written since the CTA's launch: not by way of the first level of cache.
__device__ __forceinline__ Vector load_row(const void* row, int64_t at) {
  const uint4 v = __ldcg(reinterpret_cast<const uint4*>(static_cast<const bf16*>(row) + at));
  return {{v.x, v.y, v.z, v.w}};
}

__device__ __forceinline__ float load_value(const void* row, int64_t at) {
  return __uint_as_float(static_cast<u32>(__ldcg(static_cast<const unsigned short*>(row) + at))
                         << 16);
}

/// kTiles times 8 rows. The more CTAs of 8 warps a multiprocessor holds, the busier is the memory.
template <int kTiles, int kWarps, bool kIsChanged>
__global__ void __launch_bounds__(kWarps * 32, kWarps > 8 ? 1 : 4 - kTiles)
    sums_kernel(const __grid_constant__ Arguments p) {
  using S = Shared<kTiles, kWarps, kIsChanged>;
  __shared__ __align__(16) S shared;
  int which = 0;
  while (which + 1 < p.count && static_cast<int>(blockIdx.x) >= p.first_block[which + 1]) ++which;
  const FewRowSum& sum = p.sums[which];
  const bool is_gated = sum.up != nullptr, is_normed = p.norm.weight != nullptr;
  const int first =
      (static_cast<int>(blockIdx.x) - p.first_block[which]) * (is_gated ? 8 : kColumns);
  const int warp = threadIdx.x / 32, lane = threadIdx.x % 32;
  const int line = lane / 4, place = lane % 4 * 8;  // of both operands
  const int row_base = static_cast<int>(blockIdx.y) * kTiles * 8,
            rows = min(p.rows - row_base, kTiles * 8);
  const int low_column = min(first + line, sum.columns - 1),
            high_column = is_gated ? low_column : min(first + line + 8, sum.columns - 1);

  Vector b[kAhead][2], a[kAhead][kTiles];
  const auto fetch_columns = [&](const FewRowTerm& term, const void* high, int base) {
    const bf16* const from_low =
        static_cast<const bf16*>(term.b) + low_column * term.b_stride + place;
    const bf16* const from_high =
        static_cast<const bf16*>(high) + high_column * term.b_stride + place;
#pragma unroll
    for (int n = 0; n < kAhead; ++n) {
      const int at = base + n * kWarps * kDepth;
      b[n][0] = {}, b[n][1] = {};
      if (at + place < term.depth)
        b[n][0] = load<8>(from_low + at), b[n][1] = load<8>(from_high + at);
    }
  };
  const auto fetch_rows = [&](const FewRowTerm& term, int at, Vector(&to)[kTiles]) {
#pragma unroll
    for (int r = 0; r < kTiles; ++r) {
      to[r] = {};
      if (at + place < term.depth && r * 8 + line < rows) {
        to[r] = load_row(term.a, (row_base + r * 8 + line) * term.a_stride + place + at);
      }
    }
  };

  const bool is_first = p.order == FewRowOrder::kFirstOfTwo,
             is_second = p.order == FewRowOrder::kSecondOfTwo;
  if (!is_first) let_next_begin();
  const auto high_of = [&](int t) { return t == 0 && is_gated ? sum.up : sum.terms[t].b; };
  // The matrices are on their way while the rows of a are still being computed.
  fetch_columns(sum.terms[0], high_of(0), warp * kDepth);
  if (!is_second) wait_for_previous();
  if (is_first) let_next_begin();

  // The thread's outputs, and on its way what they are added to.
  constexpr int kOutputs = (kTiles * 8 * kColumns + kWarps * 32 - 1) / (kWarps * 32);
  const auto place_of = [&](int n, int& row, int& slot) {
    const int i = threadIdx.x + n * kWarps * 32;
    row = i / kColumns, slot = i % kColumns;
    return row < rows && first + slot < sum.columns && (!is_gated || slot < 8);
  };
  float start[kOutputs];
#pragma unroll
  for (int n = 0; n < kOutputs; ++n) {
    int row, slot;
    start[n] = 0;
    if (place_of(n, row, slot) && sum.start != nullptr)
      start[n] = load_value(sum.start, (row_base + row) * sum.start_stride + first + slot);
  }

  float total[kTiles][4] = {}, squares[kTiles] = {};
  for (int t = 0; t < sum.term_count; ++t) {
    const FewRowTerm& term = sum.terms[t];
    for (int base = warp * kDepth; base < term.depth; base += kWarps * kDepth * kAhead) {
      if (t > 0 || base > warp * kDepth) fetch_columns(term, high_of(t), base);
#pragma unroll
      for (int n = 0; n < kAhead; ++n) fetch_rows(term, base + n * kWarps * kDepth, a[n]);
#pragma unroll
      for (int n = 0; n < kAhead; ++n) {
        const int column = base + n * kWarps * kDepth + place;
        if (t == 0 && is_normed && column < term.depth) apply_norm(p.norm, column, a[n], squares);
        multiply(total, b[n][0], b[n][1], a[n]);
      }
    }
  }
  put(shared.sums[warp], total);
#pragma unroll
  for (int r = 0; r < kTiles; ++r) {
    const float square = lane_sum<4>(squares[r]);
    if (lane % 4 == 0) shared.squares[warp][r][line] = square;
  }
  if constexpr (kIsChanged) {
    if (is_second) wait_for_previous();
    if (warp < S::kChanges) {
      const FewRowChange& change = warp == 0 ? sum.change : sum.up_change;
      float output[kTiles][4] = {};
      for (int at = 0; at < change.rank; at += kDepth) {
        Vector columns[2] = {}, low[kTiles] = {};
        if (at + place < change.rank) {
          const bf16* const from = static_cast<const bf16*>(change.b) + at + place;
          if (warp == 0) columns[0] = load<8>(from + low_column * change.b_stride);
          if (warp == 1 || !is_gated) columns[1] = load<8>(from + high_column * change.b_stride);
#pragma unroll
          for (int r = 0; r < kTiles; ++r) {
            if (r * 8 + line < rows)
              low[r] = load_row(change.low, (r * 8 + line) * change.low_stride + at + place);
          }
        }
        multiply(output, columns[0], columns[1], low);
      }
      put(shared.changes[warp], output);
    }
  }
  __syncthreads();
  const auto rstd = [&](int row) {
    if (!is_normed) return 1.f;
    float square = 0;
#pragma unroll
    for (int w = 0; w < kWarps; ++w) square += shared.squares[w][row / 8][row % 8];
    return rsqrtf(square / sum.terms[0].depth + p.norm.eps);
  };

#pragma unroll
  for (int n = 0; n < kOutputs; ++n) {
    int row, slot;
    if (!place_of(n, row, slot)) continue;
    const auto value = [&](int of) {
      float y = 0;
#pragma unroll
      for (int w = 0; w < kWarps; ++w) y += shared.sums[w][row / 8][row % 8][of];
      y *= rstd(row);
      if constexpr (kIsChanged) {
#pragma unroll
        for (int c = 0; c < S::kChanges; ++c) y += shared.changes[c][row / 8][row % 8][of];
      }
      return y * sum.scale;
    };
    float y = value(slot);
    if (is_gated) {
      const float gate = __bfloat162float(__float2bfloat16_rn(y)),
                  up = __bfloat162float(__float2bfloat16_rn(value(slot + 8)));
      y = gate * sigmoid(gate) * up;
    }
    static_cast<bf16*>(sum.y)[(row_base + row) * sum.y_stride + first + slot] =
        __float2bfloat16_rn(y + start[n]);
  }
}

constexpr int kFewBlocks = 128;

template <int kTiles, int kWarps, bool kIsChanged>
void launch(const Arguments& p, int blocks, cudaStream_t stream) {
  const dim3 grid(static_cast<unsigned>(blocks),
                  static_cast<unsigned>((p.rows + kTiles * 8 - 1) / (kTiles * 8)));
  launch_dependent(sums_kernel<kTiles, kWarps, kIsChanged>, grid, dim3(kWarps * 32), 0, stream, p);
}

/// A launch of few CTAs needs more warps in each to keep the memory busy.
template <int kTiles, bool kIsChanged>
void launch(const Arguments& p, int blocks, cudaStream_t stream) {
  blocks <= kFewBlocks ? launch<kTiles, 16, kIsChanged>(p, blocks, stream)
                       : launch<kTiles, 8, kIsChanged>(p, blocks, stream);
}

}  // namespace

void few_row_sums(int rows, const std::vector<FewRowSum>& sums, cudaStream_t stream,
                  const FewRowNorm& norm, FewRowOrder order) {
  if (rows < 1 || sums.empty() || sums.size() > kMostFewRowSums)
    throw std::invalid_argument("few_row_sums: too many sums, or no rows");
  Arguments p{};
  p.count = static_cast<int>(sums.size());
  p.rows = rows;
  p.norm = norm;
  p.order = order;
  int blocks = 0, deepest = 0;
  bool is_changed = false;
  for (int i = 0; i < p.count; ++i) {
    const FewRowSum& sum = p.sums[i] = sums[static_cast<std::size_t>(i)];
    p.first_block[i] = blocks;
    const int columns = sum.up != nullptr ? 8 : kColumns;
    blocks += (sum.columns + columns - 1) / columns;
    is_changed |= sum.change.rank + sum.up_change.rank > 0;
    for (int t = 0; t < sum.term_count; ++t) deepest = std::max(deepest, sum.terms[t].depth);
  }
  if (rows > kMostFewRows && is_changed)
    throw std::invalid_argument("few_row_sums: too many rows for changes");
  if (is_changed) {
    rows <= 8 ? launch<1, true>(p, blocks, stream) : launch<2, true>(p, blocks, stream);
  } else if (deepest <= kDepth * kAhead) {
    launch<2, 1, false>(p, blocks, stream);  // one warp sums them alone
  } else {
    rows <= 8 ? launch<1, false>(p, blocks, stream) : launch<2, false>(p, blocks, stream);
  }
  check_launch("few_row_sums");
}

}  // namespace heddle::ops::cuda
