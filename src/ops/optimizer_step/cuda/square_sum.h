// Sum of squares over many tensors. Plain C++ header.
#pragma once

#include <vector>

#include "ops/cuda/element.h"

namespace heddle::ops::cuda {

/// `count` contiguous elements from an address that is a multiple of 16 bytes.
struct SquareSumEntry {
  const void* data = nullptr;
  int64_t count = 0;
  Element type = Element::kFloat32;
};

/// Doubles of scratch that square_sum needs.
int64_t square_sum_workspace(const std::vector<SquareSumEntry>& entries);

/// Writes the sum of squares of all entries to `total` on the device: fp32 over 64 elements of a
/// thread, fp64 beyond; the same bits every time.
void square_sum(const std::vector<SquareSumEntry>& entries, double* workspace, double* total,
                cudaStream_t stream);

/// The tables of sums over groups of tensors, as they lie on the host and, copied, on the device.
struct SquareSumGroups {
  std::vector<SquareSumEntry> entries;
  std::vector<int> first_block, tensor_of_block;
  std::vector<int> group_begin = {0};  ///< First block of each group, and the end.

  void add(const SquareSumEntry& entry);
  void end_group() { group_begin.push_back(static_cast<int>(tensor_of_block.size())); }
};
/// Places of such tables on the device.
struct SquareSumGroupsOnDevice {
  const SquareSumEntry* entries;
  const int *first_block, *tensor_of_block, *group_begin;
  int blocks, groups;
};
/// Writes each group's sum to totals[group], with the bits of square_sum(), in two launches.
/// `workspace`: a double for each block.
void square_sums(const SquareSumGroupsOnDevice& groups, double* workspace, double* totals,
                 cudaStream_t stream);

}  // namespace heddle::ops::cuda
