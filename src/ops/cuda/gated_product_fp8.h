// SwiGLU whose results are written in 8 bits as well. Plain C++ header.
#pragma once

#include "ops/cuda/element.h"
#include "ops/cuda/fp8.h"

namespace heddle::ops::cuda {

/// Rows of bf16 that a block holds in registers.
constexpr int64_t kGatedProductLongestFp8Row = 10240;

/// y = x silu(gate); all rows of 16 bytes, `width` a multiple of 8 up to the longest row. Bytes per
/// element: 7, where gated_product_forward and fp8_rows take 9.
void swiglu_forward_fp8(int64_t rows, int64_t width, const InputRows& x, const InputRows& gate,
                        const OutputRows& y, const Fp8Rows& y_fp8, cudaStream_t stream);

/// Both gradients, and y again unless it is null. Bytes per element: 12 (14 with y) in place of 16.
void swiglu_backward_fp8(int64_t rows, int64_t width, const InputRows& x, const InputRows& gate,
                         const InputRows& grad_y, const OutputRows& grad_x,
                         const OutputRows& grad_gate, const OutputRows& y,
                         const Fp8Rows& grad_x_fp8, const Fp8Rows& grad_gate_fp8,
                         cudaStream_t stream);

}  // namespace heddle::ops::cuda
