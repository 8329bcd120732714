#pragma once

#include <utility>
#include <vector>

#include "ops/causal_conv1d/causal_conv1d.h"

namespace heddle::ops::causal_conv1d_reference {

std::pair<at::Tensor, at::Tensor> forward(const CausalConv1d::Inputs& inputs);
CausalConv1d::Gradients backward(const CausalConv1d::Inputs& inputs, const at::Tensor& grad_y,
                                 const at::Tensor& grad_final_state);
at::Tensor step(const at::Tensor& x, const at::Tensor& weight, at::Tensor& states,
                const std::vector<std::int64_t>& slots);

}  // namespace heddle::ops::causal_conv1d_reference

namespace heddle::ops::causal_conv1d_cuda {

/// Adds "cuda.fused"; nothing in a build without CUDA.
void add(Registry& registry);

}  // namespace heddle::ops::causal_conv1d_cuda

namespace heddle::ops::causal_conv1d_npu {

/// Adds "npu.tiled".
void add(Registry& registry);

}  // namespace heddle::ops::causal_conv1d_npu
