#include <ATen/TensorOperators.h>
#include <ATen/ops/cat.h>
#include <ATen/ops/mean.h>
#include <ATen/ops/rsqrt.h>
#include <ATen/ops/sum.h>

#include "ops/compute_type.h"
#include "ops/rotary/kernels.h"

namespace heddle::ops::qk_norm_rope_reference {
namespace {

/// Turns the pairs (i, i + half) of the first 2 x half entries by the angles; sin negated turns
/// back.
at::Tensor rotate(const at::Tensor& x, const at::Tensor& cos, const at::Tensor& sin) {
  const std::int64_t half = cos.size(1);
  const at::Tensor c = cos.unsqueeze(1), s = sin.unsqueeze(1);
  const at::Tensor a = x.narrow(-1, 0, half), b = x.narrow(-1, half, half);
  return at::cat({a * c - b * s, b * c + a * s, x.narrow(-1, 2 * half, x.size(-1) - 2 * half)}, -1);
}

}  // namespace

std::pair<at::Tensor, at::Tensor> forward(const at::Tensor& x, const NormWeight& weight,
                                          const at::Tensor& cos, const at::Tensor& sin,
                                          double eps) {
  const c10::ScalarType type = compute_type(x);
  const at::Tensor input = x.to(type);
  const at::Tensor rstd = at::rsqrt(at::mean(input * input, {-1}, /*keepdim=*/true) + eps);
  const at::Tensor normalized = input * rstd * weight.scale(type);
  return {rotate(normalized, cos.to(type), sin.to(type)).to(x.scalar_type()), rstd.squeeze(-1)};
}

std::pair<at::Tensor, at::Tensor> backward(const at::Tensor& x, const NormWeight& weight,
                                           const at::Tensor& cos, const at::Tensor& sin,
                                           const at::Tensor& rstd, const at::Tensor& grad_y,
                                           bool wants_weight) {
  const c10::ScalarType type = compute_type(x);
  const at::Tensor scale = rstd.unsqueeze(-1);
  const at::Tensor normalized = x.to(type) * scale;
  const at::Tensor dy = rotate(grad_y.to(type), cos.to(type), -sin.to(type));
  const at::Tensor dn = dy * weight.scale(type);
  const at::Tensor dx =
      scale * (dn - normalized * at::mean(dn * normalized, {-1}, /*keepdim=*/true));
  if (!wants_weight) return {dx.to(x.scalar_type()), {}};
  const at::Tensor dw = at::sum((dy * normalized).flatten(0, 1), {0});
  return {dx.to(x.scalar_type()), dw.to(weight.value.scalar_type())};
}

}  // namespace heddle::ops::qk_norm_rope_reference
