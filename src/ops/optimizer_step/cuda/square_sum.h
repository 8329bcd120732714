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

}  // namespace heddle::ops::cuda
