// AdamW over many tensors whose moments are 8-bit codes (optimizer_step/eight_bit.h). Plain C++
// header: raw pointers, sizes and a stream.
#pragma once

#include <cuda_runtime_api.h>

#include <cstdint>
#include <vector>

#include "ops/optimizer_step/cuda/adamw_scalars.h"

namespace heddle::ops::cuda {

/// One parameter: `count` contiguous elements, a multiple of eight_bit::kBlock. Weight and gradient
/// bf16 or fp32; codes start on 8 bytes, the others on 16.
struct AdamwEightBitTensor {
  void* parameter = nullptr;
  const void* gradient = nullptr;
  std::uint8_t *exp_avg = nullptr, *exp_avg_sq = nullptr;
  float *exp_avg_scale = nullptr, *exp_avg_sq_scale = nullptr;  ///< One for each block.
  std::int64_t count = 0;
  std::uint64_t rounding_key = 0;
  double weight_decay = 0;
  bool parameter_is_float = false, gradient_is_float = false;
};

/// Enqueues the update of all tensors on `stream`; no host synchronisation. Throws
/// std::runtime_error on a CUDA error.
void adamw_eight_bit(const std::vector<AdamwEightBitTensor>& tensors, const AdamwScalars& scalars,
                     cudaStream_t stream);

}  // namespace heddle::ops::cuda
