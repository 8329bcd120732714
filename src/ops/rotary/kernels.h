#pragma once

#include <utility>

#include "ops/rotary/rotary.h"

namespace heddle::ops::qk_norm_rope_reference {

std::pair<at::Tensor, at::Tensor> forward(const at::Tensor& x, const NormWeight& weight,
                                          const at::Tensor& cos, const at::Tensor& sin, double eps);
std::pair<at::Tensor, at::Tensor> backward(const at::Tensor& x, const NormWeight& weight,
                                           const at::Tensor& cos, const at::Tensor& sin,
                                           const at::Tensor& rstd, const at::Tensor& grad_y,
                                           bool wants_weight);

}  // namespace heddle::ops::qk_norm_rope_reference

namespace heddle::ops::qk_norm_rope_cpu {

std::pair<at::Tensor, at::Tensor> forward(const at::Tensor& x, const NormWeight& weight,
                                          const at::Tensor& cos, const at::Tensor& sin, double eps);
std::pair<at::Tensor, at::Tensor> backward(const at::Tensor& x, const NormWeight& weight,
                                           const at::Tensor& cos, const at::Tensor& sin,
                                           const at::Tensor& rstd, const at::Tensor& grad_y,
                                           bool wants_weight);

}  // namespace heddle::ops::qk_norm_rope_cpu
