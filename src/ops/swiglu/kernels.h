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

namespace heddle::ops::swiglu_cuda {

/// Adds "cuda.fused"; nothing in a build without CUDA.
void add(Registry& registry);

}  // namespace heddle::ops::swiglu_cuda

namespace heddle::ops::swiglu_npu {

/// Adds "npu.swiglu".
void add(Registry& registry);

}  // namespace heddle::ops::swiglu_npu
