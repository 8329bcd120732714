#pragma once

#include <utility>

#include "ops/causal_conv1d/causal_conv1d.h"
#include "ops/causal_conv1d/conv_decode.h"

namespace heddle::ops {

/// TORCH_CHECKs, in the name of `op`, that x is [T,C] and weight [C,W].
void check_conv(const char* op, const at::Tensor& x, const at::Tensor& weight);

/// Adds the kernels of conv_decode.
void register_conv_decode(Registry& registry);

}  // namespace heddle::ops

namespace heddle::ops::causal_conv1d_reference {

std::pair<at::Tensor, at::Tensor> forward(const CausalConv1d::Inputs& inputs);
CausalConv1d::Gradients backward(const CausalConv1d::Inputs& inputs, const at::Tensor& grad_y,
                                 const at::Tensor& grad_final_state);
at::Tensor decode(const at::Tensor& x, const at::Tensor& weight, const at::Tensor& states,
                  const CacheRows& rows);

}  // namespace heddle::ops::causal_conv1d_reference
