#pragma once

#include "ops/linear_cross_entropy/linear_cross_entropy.h"

namespace heddle::ops::linear_cross_entropy_reference {

LinearCrossEntropy::Result forward(const LinearCrossEntropy::Inputs& inputs, bool want_grad_hidden,
                                   bool want_grad_weight, at::Tensor& grad_weight_buffer);

}  // namespace heddle::ops::linear_cross_entropy_reference

/// With Inputs::support, on every device: reads those rows of the head alone.
namespace heddle::ops::linear_cross_entropy_over_support {

LinearCrossEntropy::Result forward(const LinearCrossEntropy::Inputs& inputs, bool want_grad_hidden,
                                   bool want_grad_weight, at::Tensor& grad_weight_buffer);

}  // namespace heddle::ops::linear_cross_entropy_over_support

namespace heddle::ops::linear_cross_entropy_cpu {

LinearCrossEntropy::Result forward(const LinearCrossEntropy::Inputs& inputs, bool want_grad_hidden,
                                   bool want_grad_weight, at::Tensor& grad_weight_buffer);

}  // namespace heddle::ops::linear_cross_entropy_cpu
