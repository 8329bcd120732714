#pragma once

#include <utility>

#include "ops/rms_norm/rms_norm.h"

namespace heddle::ops::rms_norm_reference {

RmsNorm::Forward forward(const at::Tensor& x, const at::Tensor& residual, const NormWeight& weight,
                         double eps);
RmsNorm::Gradients backward(const RmsNorm::Backward& in);

}  // namespace heddle::ops::rms_norm_reference

namespace heddle::ops::rms_norm_cpu {

RmsNorm::Forward forward(const at::Tensor& x, const at::Tensor& residual, const NormWeight& weight,
                         double eps);
RmsNorm::Gradients backward(const RmsNorm::Backward& in);

}  // namespace heddle::ops::rms_norm_cpu

namespace heddle::ops::rms_norm_npu {

/// By npu_gemma_rms_norm, or npu_rms_norm for plain weights.
RmsNorm::Forward forward(const at::Tensor& x, const at::Tensor& residual, const NormWeight& weight,
                         double eps);

}  // namespace heddle::ops::rms_norm_npu
