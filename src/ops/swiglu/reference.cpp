#include <ATen/TensorOperators.h>
#include <ATen/ops/sigmoid.h>

#include "ops/compute_type.h"
#include "ops/swiglu/kernels.h"

namespace heddle::ops::swiglu_reference {

at::Tensor forward(const at::Tensor& gate, const at::Tensor& up) {
  const at::Tensor g = gate.to(compute_type(gate));
  return (g * at::sigmoid(g) * up).to(gate.scalar_type()).contiguous();
}

std::pair<at::Tensor, at::Tensor> backward(const at::Tensor& gate, const at::Tensor& up,
                                           const at::Tensor& grad_y) {
  const c10::ScalarType type = compute_type(gate);
  const at::Tensor g = gate.to(type);
  const at::Tensor dy = grad_y.to(type);
  const at::Tensor s = at::sigmoid(g);
  const at::Tensor d_gate = dy * up * s * (1 + g * (1 - s));
  const at::Tensor d_up = dy * g * s;
  return {d_gate.to(gate.scalar_type()), d_up.to(up.scalar_type())};
}

}  // namespace heddle::ops::swiglu_reference
