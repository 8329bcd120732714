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
using StoredTable = StoredTensorTable<SquareSumEntry, kBlockElements>;

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

template <class SomeTable>
__global__ void __launch_bounds__(kThreads)
    parts_kernel(const __grid_constant__ SomeTable table, double* parts) {
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

__device__ __forceinline__ void write_total(const double* parts, int64_t count, double* total) {
  double sum = 0;
  for (int64_t i = threadIdx.x; i < count; i += kThreads) sum += parts[i];
  sum = block_total(sum);
  if (threadIdx.x == 0) *total = sum;
}

__global__ void __launch_bounds__(kThreads)
    total_kernel(const double* parts, int64_t count, double* total) {
  write_total(parts, count, total);
}

/// A block sums the parts of a group.
__global__ void __launch_bounds__(kThreads)
    totals_kernel(const double* parts, const int* group_begin, double* totals) {
  const int begin = group_begin[blockIdx.x];
  write_total(parts + begin, group_begin[blockIdx.x + 1] - begin, totals + blockIdx.x);
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

void SquareSumGroups::add(const SquareSumEntry& entry) {
  const int tensor = static_cast<int>(entries.size());
  entries.push_back(entry);
  first_block.push_back(static_cast<int>(tensor_of_block.size()));
  tensor_of_block.resize(tensor_of_block.size() + static_cast<std::size_t>(Table::blocks_of(entry)),
                         tensor);
}

void square_sums(const SquareSumGroupsOnDevice& groups, double* workspace, double* totals,
                 cudaStream_t stream) {
  if (groups.blocks > 0)
    parts_kernel<<<groups.blocks, kThreads, 0, stream>>>(
        StoredTable{groups.entries, groups.tensor_of_block, groups.first_block}, workspace);
  totals_kernel<<<groups.groups, kThreads, 0, stream>>>(workspace, groups.group_begin, totals);
  check_launch("square_sums");
}

}  // namespace heddle::ops::cuda
