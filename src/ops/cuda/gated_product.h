// CUDA kernels of y = x * activation(gate): SwiGLU and the output gate of attention. Plain C++
// header.
#pragma once

#include "ops/cuda/element.h"

namespace heddle::ops::cuda {

enum class GateActivation { kSilu, kSigmoid };

/// All tensors are [outer, inner, width], rows as InputRows has them.
struct GatedProductShape {
  GateActivation activation = GateActivation::kSilu;
  Element type = Element::kBFloat16;
  int64_t outer = 0, inner = 1, width = 0;
};

/// Bytes per element: 3 x its size.
void gated_product_forward(const GatedProductShape& shape, const InputRows& x,
                           const InputRows& gate, const OutputRows& y, cudaStream_t stream);

/// Recomputes the activation, and y with it where `y` has data. Bytes per element: 5 x its size (6
/// with y).
void gated_product_backward(const GatedProductShape& shape, const InputRows& x,
                            const InputRows& gate, const InputRows& grad_y,
                            const OutputRows& grad_x, const OutputRows& grad_gate,
                            const OutputRows& y, cudaStream_t stream);

}  // namespace heddle::ops::cuda
