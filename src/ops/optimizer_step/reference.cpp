#include <ATen/TensorOperators.h>
#include <ATen/ops/sqrt.h>

#include <cmath>

#include "ops/optimizer_step/kernels.h"

namespace heddle::ops::adamw_reference {

void step(const std::vector<AdamwTensor>& tensors, const AdamwOptions& options) {
  const double correction1 = 1 - std::pow(options.beta1, static_cast<double>(options.step));
  const double correction2 = 1 - std::pow(options.beta2, static_cast<double>(options.step));
  for (const AdamwTensor& tensor : tensors) {
    at::Tensor p = tensor.master.defined() ? tensor.master : tensor.parameter;
    at::Tensor m = tensor.exp_avg, v = tensor.exp_avg_sq;
    const at::Tensor g = tensor.gradient.to(m.scalar_type()) * options.gradient_multiplier;
    p.mul_(1 - options.lr * tensor.weight_decay);
    m.lerp_(g, 1 - options.beta1);
    v.mul_(options.beta2).addcmul_(g, g, 1 - options.beta2);
    const at::Tensor denominator = at::sqrt(v).div_(std::sqrt(correction2)).add_(options.eps);
    p.addcdiv_(m, denominator, -options.lr / correction1);
    if (tensor.master.defined()) tensor.parameter.copy_(p);
  }
}

}  // namespace heddle::ops::adamw_reference
