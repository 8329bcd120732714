// Kernels that join the shared expert to the routed ones. bf16, arithmetic in fp32, no atomics.
// Plain C++, no ATen. Rows are contiguous, begin on 16 bytes, and widths are multiples of 8.
#pragma once

#include "ops/cuda/element.h"

namespace heddle::ops::cuda {

/// y = routed + sigmoid(gate) * shared, and + residual unless that is null; routed, shared,
/// residual, y [T,width], gate [T], its elements `gate_stride` apart. Bytes per element: 6, with a
/// residual 8.
void shared_expert_forward(int64_t tokens, int64_t width, const void* routed, const void* shared,
                           const void* gate, int64_t gate_stride, const void* residual, void* y,
                           cudaStream_t stream);

/// The gradients of shared and of the gate, whose elements lie `grad_gate_stride` apart. Bytes per
/// element: 6.
void shared_expert_backward(int64_t tokens, int64_t width, const void* shared, const void* gate,
                            int64_t gate_stride, const void* grad_y, void* grad_shared,
                            void* grad_gate, int64_t grad_gate_stride, cudaStream_t stream);

}  // namespace heddle::ops::cuda
