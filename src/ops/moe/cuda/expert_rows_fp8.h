// Rows and matrices of experts in 8-bit floats. Conventions as in expert_rows.h. Plain C++, no
// ATen.
#pragma once

#include "ops/cuda/element.h"
#include "ops/cuda/fp8.h"

namespace heddle::ops::cuda {

/// Longest rows of hidden, which a warp holds in registers.
constexpr int64_t kLongestExpertRow = 2048;

/// weighted_swiglu_forward, hidden [N,width] in e4m3 with a scale for each row, converted before
/// it is ever rounded to bf16. Throws std::invalid_argument for longer rows.
void weighted_swiglu_forward_fp8(int64_t count, int64_t width, const void* gate_up,
                                 const void* weights, const int64_t* source, const Fp8Rows& hidden,
                                 cudaStream_t stream);

/// weighted_swiglu_backward without hidden, the gradient of gate_up [N, 2 width] in e4m3 with a
/// scale for each row.
void weighted_swiglu_backward_fp8(int64_t count, int64_t width, const void* gate_up,
                                  const void* grad_hidden, const void* weights,
                                  const int64_t* source, const Fp8Rows& grad_gate_up,
                                  void* grad_weights, cudaStream_t stream);

/// y [matrices,size] e4m3 and scales [matrices] of x bf16, one scale for a whole matrix: then the
/// same values serve products with it and with its transpose. `size` is a multiple of 8.
void fp8_matrices(int64_t matrices, int64_t size, const void* x, void* y, float* scales,
                  cudaStream_t stream);

}  // namespace heddle::ops::cuda
