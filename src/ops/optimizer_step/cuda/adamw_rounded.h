// AdamW over many tensors whose weights and moments are bf16, rounded stochastically. Plain C++
// header: raw pointers, sizes and a stream.
#pragma once

#include <cuda_runtime_api.h>

#include <cstdint>
#include <vector>

#include "ops/optimizer_step/cuda/adamw_scalars.h"

namespace heddle::ops::cuda {

/// One parameter: `count` contiguous elements; pointers as AdamwEntry's. Weight and moments bf16,
/// gradient bf16 or fp32.
struct AdamwRoundedTensor {
  void* parameter = nullptr;
  const void* gradient = nullptr;
  void* exp_avg = nullptr;
  void* exp_avg_sq = nullptr;
  std::int64_t count = 0;
  std::uint64_t rounding_key = 0;
  double weight_decay = 0;
  bool gradient_is_float = false;
};

/// Enqueues the update of all tensors on `stream`, 56 of them a launch; no host synchronisation.
/// Throws std::runtime_error on a CUDA error.
void adamw_rounded(const std::vector<AdamwRoundedTensor>& tensors, const AdamwScalars& scalars,
                   cudaStream_t stream);

}  // namespace heddle::ops::cuda
