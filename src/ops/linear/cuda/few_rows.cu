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
// All sums of a call share the launch: at these sizes a launch costs as much as the reading.
//
// On-chip memory of a CTA: the sums of its 8 or 16 warps, 16 x 8 floats each for every 8 rows.
#include "ops/linear/cuda/few_rows.h"

#include <stdexcept>

#include "ops/cuda/dependent_launch.cuh"
#include "ops/cuda/element.h"
#include "ops/cuda/mma.cuh"
#include "ops/cuda/vector.cuh"

namespace heddle::ops::cuda {
namespace {

constexpr int kColumns = 16, kDepth = 32, kAhead = 4;

struct Arguments {
  FewRowSum sums[kMostFewRowSums];
  int first_block[kMostFewRowSums];
  int count, rows;
};

/// kTiles times 8 rows.
template <int kTiles, int kWarps>
__global__ void __launch_bounds__(kWarps * 32) sums_kernel(const __grid_constant__ Arguments p) {
  __shared__ float shares[kWarps][kTiles][8][kColumns];
  int which = 0;
  while (which + 1 < p.count && static_cast<int>(blockIdx.x) >= p.first_block[which + 1]) ++which;
  const FewRowSum& sum = p.sums[which];
  const int first = (static_cast<int>(blockIdx.x) - p.first_block[which]) * kColumns;
  const int warp = threadIdx.x / 32, lane = threadIdx.x % 32;
  const int line = lane / 4, place = lane % 4 * 8;  // of both operands
  float total[kTiles][4] = {};
  let_next_begin();
  bool waits = true;
  for (int t = 0; t < sum.term_count; ++t) {
    const FewRowTerm& term = sum.terms[t];
    const bf16* const low = static_cast<const bf16*>(term.b) +
                            min(first + line, sum.columns - 1) * term.b_stride + place;
    const bf16* const high = static_cast<const bf16*>(term.b) +
                             min(first + line + 8, sum.columns - 1) * term.b_stride + place;
    const bf16* const rows = static_cast<const bf16*>(term.a) + line * term.a_stride + place;
    for (int base = warp * kDepth; base < term.depth; base += kWarps * kDepth * kAhead) {
      Packed<bf16, 8> b[kAhead][2], a[kAhead][kTiles];
#pragma unroll
      for (int n = 0; n < kAhead; ++n) {
        const int at = base + n * kWarps * kDepth;
        const bool is_inside = at + place < term.depth;
        b[n][0] = {}, b[n][1] = {};
        if (is_inside) b[n][0] = load<8>(low + at), b[n][1] = load<8>(high + at);
      }
      // The matrices are on their way while the rows of a are still being computed.
      if (waits) wait_for_previous();
      waits = false;
#pragma unroll
      for (int n = 0; n < kAhead; ++n) {
        const int at = base + n * kWarps * kDepth;
        const bool is_inside = at + place < term.depth;
#pragma unroll
        for (int r = 0; r < kTiles; ++r) {
          a[n][r] = {};
          if (is_inside && r * 8 + line < p.rows)
            a[n][r] = load<8>(rows + r * 8 * term.a_stride + at);
        }
      }
#pragma unroll
      for (int n = 0; n < kAhead; ++n) {
#pragma unroll
        for (int r = 0; r < kTiles; ++r) {
#pragma unroll
          for (int half = 0; half < 4; half += 2) {
            const u32 columns[4] = {b[n][0].words[half], b[n][1].words[half],
                                    b[n][0].words[half + 1], b[n][1].words[half + 1]};
            mma_bf16(total[r], columns, a[n][r].words[half], a[n][r].words[half + 1]);
          }
        }
      }
    }
  }
#pragma unroll
  for (int r = 0; r < kTiles; ++r) {
#pragma unroll
    for (int i = 0; i < 4; ++i)
      shares[warp][r][lane % 4 * 2 + i % 2][line + i / 2 * 8] = total[r][i];
  }
  __syncthreads();
  const int column = first + static_cast<int>(threadIdx.x) % kColumns,
            row = static_cast<int>(threadIdx.x) / kColumns;
  if (row >= p.rows || column >= sum.columns) return;
  if (waits) wait_for_previous();  // a warp beyond the depth
  float y = 0;
#pragma unroll
  for (int w = 0; w < kWarps; ++w) y += shares[w][row / 8][row % 8][threadIdx.x % kColumns];
  y *= sum.scale;
  if (sum.start != nullptr)
    y += __bfloat162float(static_cast<const bf16*>(sum.start)[row * sum.start_stride + column]);
  static_cast<bf16*>(sum.y)[row * sum.y_stride + column] = __float2bfloat16_rn(y);
}

constexpr int kFewBlocks = 128;
static_assert(kMostFewRows * kColumns <= 8 * 32, "a thread writes one result");

}  // namespace

void few_row_sums(int rows, const std::vector<FewRowSum>& sums, cudaStream_t stream) {
  if (rows < 1 || rows > kMostFewRows || sums.empty() || sums.size() > kMostFewRowSums)
    throw std::invalid_argument("few_row_sums: too many rows or sums");
  Arguments p{};
  p.count = static_cast<int>(sums.size());
  p.rows = rows;
  int blocks = 0;
  for (int i = 0; i < p.count; ++i) {
    p.sums[i] = sums[static_cast<std::size_t>(i)];
    p.first_block[i] = blocks;
    blocks += (p.sums[i].columns + kColumns - 1) / kColumns;
  }
  // A launch of few CTAs needs more warps in each to keep the memory busy.
  const auto launch = [&](auto kernel, int warps) {
    launch_dependent(kernel, dim3(static_cast<unsigned>(blocks)),
                     dim3(static_cast<unsigned>(warps * 32)), 0, stream, p);
  };
  if (blocks <= kFewBlocks) {
    rows <= 8 ? launch(sums_kernel<1, 16>, 16) : launch(sums_kernel<2, 16>, 16);
  } else {
    rows <= 8 ? launch(sums_kernel<1, 8>, 8) : launch(sums_kernel<2, 8>, 8);
  }
  check_launch("few_row_sums");
}

}  // namespace heddle::ops::cuda
