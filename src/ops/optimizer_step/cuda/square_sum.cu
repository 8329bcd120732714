// A block sums kBlockElements neighbours of one tensor, eight a thread and step, into scratch; one
// block then sums the scratch.
#include "ops/optimizer_step/cuda/square_sum.h"

#include "ops/cuda/vector.cuh"
#include "ops/optimizer_step/cuda/tensor_table.cuh"

namespace heddle::ops::cuda {
namespace {

constexpr int kThreads = 256, kWidth = 8, kSteps = 8;
constexpr int kBlockElements = kThreads * kWidth * kSteps;
using Table = TensorTable<SquareSumEntry, kBlockElements>;

/// The sum over the block, valid in thread 0.
__device__ __forceinline__ double block_total(double x) {
  __shared__ double of_warp[kThreads / 32];
  for (int step = 16; step > 0; step /= 2) x += __shfl_down_sync(0xffffffffu, x, step);
  if (threadIdx.x % 32 == 0) of_warp[threadIdx.x / 32] = x;
  __syncthreads();
  double total = 0;
  if (threadIdx.x == 0) {
    for (const double part : of_warp) total += part;
  }
  return total;
}

__global__ void __launch_bounds__(kThreads)
    parts_kernel(const __grid_constant__ Table table, double* parts) {
  const auto [tensor, begin] = table.place();
  const SquareSumEntry& entry = table.entries[tensor];
  float sum = 0;
#pragma unroll
  for (int k = 0; k < kSteps; ++k) {
    const int64_t i = begin + (k * kThreads + static_cast<int>(threadIdx.x)) * kWidth;
    if (i + kWidth <= entry.count) {
      float x[kWidth];
      read_weight(entry.data, entry.type, i, x);
#pragma unroll
      for (int j = 0; j < kWidth; ++j) sum += x[j] * x[j];
    } else {
      for (int64_t j = i; j < entry.count; ++j) {
        float x[1];
        read_weight(entry.data, entry.type, j, x);
        sum += x[0] * x[0];
      }
    }
  }
  const double total = block_total(sum);
  if (threadIdx.x == 0) parts[blockIdx.x] = total;
}

__global__ void __launch_bounds__(kThreads)
    total_kernel(const double* parts, int64_t count, double* total) {
  double sum = 0;
  for (int64_t i = threadIdx.x; i < count; i += kThreads) sum += parts[i];
  sum = block_total(sum);
  if (threadIdx.x == 0) *total = sum;
}

}  // namespace

int64_t square_sum_workspace(const std::vector<SquareSumEntry>& entries) {
  int64_t blocks = 0;
  for (const SquareSumEntry& entry : entries) blocks += Table::blocks_of(entry);
  return blocks;
}

void square_sum(const std::vector<SquareSumEntry>& entries, double* workspace, double* total,
                cudaStream_t stream) {
  int64_t first = 0;
  Table::for_each(entries, [&](const Table& table, int blocks) {
    parts_kernel<<<blocks, kThreads, 0, stream>>>(table, workspace + first);
    first += blocks;
  });
  total_kernel<<<1, kThreads, 0, stream>>>(workspace, first, total);
  check_launch("square_sum");
}

}  // namespace heddle::ops::cuda
