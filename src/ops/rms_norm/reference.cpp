#include <ATen/TensorOperators.h>
#include <ATen/ops/mean.h>
#include <ATen/ops/rsqrt.h>
#include <ATen/ops/sum.h>

#include "ops/compute_type.h"
#include "ops/rms_norm/kernels.h"

namespace heddle::ops::rms_norm_reference {

RmsNorm::Forward forward(const at::Tensor& x, const at::Tensor& residual, const NormWeight& weight,
                         double eps) {
  RmsNorm::Forward result;
  if (residual.defined()) result.sum = x + residual;
  const at::Tensor input = (residual.defined() ? result.sum : x).to(compute_type(x));
  const at::Tensor rstd = at::rsqrt(at::mean(input * input, {-1}, /*keepdim=*/true) + eps);
  result.y = (input * rstd * weight.scale(compute_type(x))).to(x.scalar_type());
  result.rstd = rstd.squeeze(-1);
  return result;
}

RmsNorm::Gradients backward(const RmsNorm::Backward& in) {
  const auto& [input, weight, rstd, grad_y, grad_y_2, grad_sum, wants_weight, wants_y] = in;
  const c10::ScalarType type = compute_type(input);
  const at::Tensor scale = rstd.unsqueeze(-1);
  const at::Tensor normalized = input.to(type) * scale;
  const at::Tensor dy = grad_y.to(type);
  const at::Tensor dn = dy * weight.scale(type);
  at::Tensor dx = scale * (dn - normalized * at::mean(dn * normalized, {-1}, /*keepdim=*/true));
  if (grad_sum.defined()) dx = dx + grad_sum;
  RmsNorm::Gradients result{dx.to(input.scalar_type()), {}, {}};
  if (wants_weight) {
    const at::Tensor dw = at::sum((dy * normalized).reshape({-1, weight.value.size(0)}), {0});
    result.weight = dw.to(weight.value.scalar_type());
  }
  return result;
}

}  // namespace heddle::ops::rms_norm_reference
