// CUDA kernels of the RMSNorm with the residual addition in it. Plain C++ header.
#pragma once

#include "ops/cuda/element.h"
#include "ops/cuda/fp8.h"

namespace heddle::ops::cuda {

/// Rows of one norm. The weight [width] has a type of its own.
struct RmsNormShape {
  Element type = Element::kBFloat16;
  Element weight_type = Element::kBFloat16;
  int64_t rows = 0, width = 0;
  float offset = 1;  // The scale is offset + weight.
};

/// Longest row: registers hold it. Shorter where rows or pointers are not multiples of 16 bytes.
constexpr int64_t kRmsNormLongestRow = 8192, kRmsNormLongestOddRow = 4096;

/// y = s * rstd * (offset + weight), rstd = rsqrt(mean(s^2) + eps); s = x, or x + residual rounded
/// to the type and stored in `sum`. y, sum and rstd (fp32 [rows]) are contiguous; residual and sum
/// are both null or both set. Bytes per row: 2 (4 with a residual) x width x element + 4. y_fp8,
/// unless null, takes y in 8 bits as well: bf16 whose rows begin on 16 bytes.
void rms_norm_forward(const RmsNormShape& shape, const InputRows& x, const InputRows& residual,
                      const void* weight, float eps, void* y, void* sum, float* rstd,
                      cudaStream_t stream, const Fp8Rows& y_fp8 = {});

/// Floats of scratch that the backward needs: one row of partial sums per CTA.
int64_t rms_norm_backward_workspace(const RmsNormShape& shape);

/// Gradients that flow back into a norm; y_2, of a second reader of y, and sum may be null.
struct NormGradients {
  InputRows y, y_2, sum;
};

/// grad_input = rstd * (dn - n mean(dn n)) + grads.sum with n = input * rstd, dn = (grads.y +
/// grads.y_2) * (offset + weight). grad_weight [width], of weight_type, unless null, = sum over
/// rows of (grads.y + grads.y_2) n. grad_input is contiguous, as is y, unless null: the forward's
/// output again. Bytes per row: (2 + the gradients + 1 with y) x width x element + 4.
/// grad_input_fp8 as y_fp8.
void rms_norm_backward(const RmsNormShape& shape, const InputRows& input, const void* weight,
                       const float* rstd, const NormGradients& grads, void* grad_input,
                       void* grad_weight, void* y, float* workspace, cudaStream_t stream,
                       const Fp8Rows& grad_input_fp8 = {});

}  // namespace heddle::ops::cuda
