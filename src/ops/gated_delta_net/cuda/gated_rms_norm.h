// CUDA kernels of the gated RMSNorm after the gated delta rule. Plain C++ header.
#pragma once

#include "ops/cuda/element.h"

namespace heddle::ops::cuda {

/// x, z [tokens, heads, width]; weight [width] of its own type, not zero-centred.
struct GatedRmsNormShape {
  Element type = Element::kBFloat16;
  Element weight_type = Element::kBFloat16;
  int64_t tokens = 0, heads = 0, width = 0;
};

/// Longest row; shorter where rows or pointers are not multiples of 16 bytes.
constexpr int64_t kGatedRmsNormLongestRow = 256;

/// y = weight * x * rstd * silu(z), rstd = rsqrt(mean(x^2) + eps) fp32 [tokens, heads]; y
/// contiguous. Bytes per row: 3 x width x element + 4.
void gated_rms_norm_forward(const GatedRmsNormShape& shape, const InputRows& x, const InputRows& z,
                            const void* weight, float eps, void* y, float* rstd,
                            cudaStream_t stream);

/// Floats of scratch that the backward needs.
int64_t gated_rms_norm_backward_workspace(const GatedRmsNormShape& shape);

/// Gradients of x and z (contiguous) and, unless null, of the weight (of its type); y, unless null,
/// takes the forward's output again. Bytes per row: 5 (6 with y) x width x element + 4.
void gated_rms_norm_backward(const GatedRmsNormShape& shape, const InputRows& x, const InputRows& z,
                             const void* weight, const float* rstd, const InputRows& grad_y,
                             void* grad_x, void* grad_z, void* grad_weight, void* y,
                             float* workspace, cudaStream_t stream);

}  // namespace heddle::ops::cuda
