#pragma once

#include <utility>

#include "ops/swiglu/swiglu.h"

namespace heddle::ops::swiglu_reference {

at::Tensor forward(const at::Tensor& gate, const at::Tensor& up);
std::pair<at::Tensor, at::Tensor> backward(const at::Tensor& gate, const at::Tensor& up,
                                           const at::Tensor& grad_y);

}  // namespace heddle::ops::swiglu_reference

namespace heddle::ops::swiglu_cpu {

at::Tensor forward(const at::Tensor& gate, const at::Tensor& up);
std::pair<at::Tensor, at::Tensor> backward(const at::Tensor& gate, const at::Tensor& up,
                                           const at::Tensor& grad_y);

}  // namespace heddle::ops::swiglu_cpu
