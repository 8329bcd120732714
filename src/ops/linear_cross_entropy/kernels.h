#pragma once

#include "ops/linear_cross_entropy/linear_cross_entropy.h"

namespace heddle::ops::linear_cross_entropy_reference {

LinearCrossEntropy::Result forward(const LinearCrossEntropy::Inputs& inputs, bool want_grad_hidden,
                                   bool want_grad_weight, at::Tensor& grad_weight_buffer);

}  // namespace heddle::ops::linear_cross_entropy_reference

namespace heddle::ops::linear_cross_entropy_cpu {

LinearCrossEntropy::Result forward(const LinearCrossEntropy::Inputs& inputs, bool want_grad_hidden,
                                   bool want_grad_weight, at::Tensor& grad_weight_buffer);

}  // namespace heddle::ops::linear_cross_entropy_cpu

namespace heddle::ops::linear_cross_entropy_cuda {

/// Adds "cuda.fused"; nothing in a build without CUDA.
void add(Registry& registry);

}  // namespace heddle::ops::linear_cross_entropy_cuda

namespace heddle::ops::linear_cross_entropy_npu {

/// Adds "npu.cross_entropy_loss".
void add(Registry& registry);

}  // namespace heddle::ops::linear_cross_entropy_npu
