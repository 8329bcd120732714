// CUDA kernels of the query and key norm with partial rotary embedding. Plain C++ header.
#pragma once

#include "ops/cuda/element.h"

namespace heddle::ops::cuda {

/// x [tokens, heads, width]; the first 2 x half entries of a head are rotated. weight [width] of
/// its own type; the scale is offset + weight.
struct QkNormRopeShape {
  Element type = Element::kBFloat16;
  Element weight_type = Element::kBFloat16;
  int64_t tokens = 0, heads = 0, width = 0, half = 0;
  float offset = 1;
};

/// Longest head; shorter where heads, pointers or `half` are not multiples of 16 bytes.
constexpr int64_t kQkNormRopeLongestRow = 256;

/// n = x * rstd * (offset + weight), rstd = rsqrt(mean(x^2) + eps) fp32 [tokens, heads]; y = n with
/// the pairs (i, i + half), i < half, turned by the angles. cos and sin fp32 [tokens, half],
/// contiguous. y contiguous. Bytes per head: 2 x width x element + 4; per token: 8 x half.
void qk_norm_rope_forward(const QkNormRopeShape& shape, const InputRows& x, const void* weight,
                          const float* cos, const float* sin, float eps, void* y, float* rstd,
                          cudaStream_t stream);

/// Floats of scratch that the backward needs.
int64_t qk_norm_rope_backward_workspace(const QkNormRopeShape& shape);

/// grad_x may be columns of a wider tensor. grad_weight, unless null, is of the weight's type.
/// Bytes per head: 3 x width x element + 4; per token: 8 x half.
void qk_norm_rope_backward(const QkNormRopeShape& shape, const InputRows& x, const void* weight,
                           const float* cos, const float* sin, const float* rstd,
                           const InputRows& grad_y, const OutputRows& grad_x, void* grad_weight,
                           float* workspace, cudaStream_t stream);

}  // namespace heddle::ops::cuda
