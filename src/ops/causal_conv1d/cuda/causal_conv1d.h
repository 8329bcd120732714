// CUDA kernels of the packed causal convolution with SiLU. Plain C++ header.
#pragma once

#include "ops/cuda/element.h"

namespace heddle::ops::cuda {

/// x [tokens, channels]; weight [channels, width] of its own type, contiguous, 2 <= width <= 8.
struct CausalConv1dShape {
  Element type = Element::kBFloat16;
  Element weight_type = Element::kBFloat16;
  int64_t tokens = 0, channels = 0, width = 4, sequences = 0;
};

constexpr int64_t kCausalConv1dMostTaps = 8;

/// Inputs of both directions. cu_seqlens: int32 [sequences + 1] on the device, from 0 to tokens,
/// non-decreasing; empty sequences allowed. initial_state [sequences, channels, width - 1] of
/// `type`, oldest first, or null (zero).
struct CausalConv1dInputs {
  InputRows x;
  const void* weight = nullptr;
  const int* cu_seqlens = nullptr;
  const void* initial_state = nullptr;
};

/// y [tokens, channels] contiguous. final_state [sequences, channels, width - 1] or null: the last
/// width - 1 inputs of each sequence, those of the initial state included. Bytes per token and
/// channel: 2 x element.
void causal_conv1d_forward(const CausalConv1dShape& shape, const CausalConv1dInputs& in, void* y,
                           void* final_state, cudaStream_t stream);

/// Floats of scratch that the backward needs.
int64_t causal_conv1d_backward_workspace(const CausalConv1dShape& shape);

/// grad_final_state may be null, grad_initial_state too (as initial_state). grad_x contiguous,
/// grad_weight of the weight's type or, with `workspace`, null. Bytes per token and channel: 3 x
/// element.
void causal_conv1d_backward(const CausalConv1dShape& shape, const CausalConv1dInputs& in,
                            const InputRows& grad_y, const void* grad_final_state, void* grad_x,
                            void* grad_weight, void* grad_initial_state, float* workspace,
                            cudaStream_t stream);

}  // namespace heddle::ops::cuda
