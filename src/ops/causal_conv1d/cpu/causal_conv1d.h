#pragma once

#include <utility>

#include "ops/causal_conv1d/causal_conv1d.h"
#include "ops/causal_conv1d/conv_decode.h"

/// "cpu.vector": channels in vectors, parallel over blocks of 64 tokens. The weight's gradient is
/// summed over the blocks in their order: the same bits for any number of threads.
namespace heddle::ops::conv_cpu {

std::pair<at::Tensor, at::Tensor> forward(const CausalConv1d::Inputs& inputs);
CausalConv1d::Gradients backward(const CausalConv1d::Inputs& inputs, const at::Tensor& grad_y,
                                 const at::Tensor& grad_final_state);
at::Tensor decode(const at::Tensor& x, const at::Tensor& weight, const at::Tensor& states,
                  const CacheRows& rows);

}  // namespace heddle::ops::conv_cpu
