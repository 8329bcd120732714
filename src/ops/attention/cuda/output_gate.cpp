// Joins the CUDA kernels of the output gate with ATen.
#include <ATen/ops/empty.h>

#include "ops/attention/kernels.h"
#include "ops/cuda/gated_product.h"
#include "ops/cuda/kernels.h"
#include "ops/cuda/tensor.h"

namespace heddle::ops::output_gate_cuda {
namespace {

cuda::GatedProductShape shape_of(const at::Tensor& x) {
  return {cuda::GateActivation::kSigmoid, cuda::element_of(x), x.size(0), x.size(1), x.size(2)};
}

at::Tensor forward(const at::Tensor& x, const at::Tensor& gate) {
  const cuda::OnDevice on(x);
  const at::Tensor in = cuda::with_unit_stride(x), g = cuda::with_unit_stride(gate);
  at::Tensor y = at::empty(x.sizes(), x.options());
  cuda::gated_product_forward(shape_of(x), cuda::input_rows(in), cuda::input_rows(g),
                              cuda::output_rows(y), on.stream());
  return y;
}

at::Tensor backward_into(const at::Tensor& x, const at::Tensor& gate, const at::Tensor& grad_y,
                         const at::Tensor& grad_gate, const at::Tensor& y) {
  const cuda::OnDevice on(x);
  const at::Tensor in = cuda::with_unit_stride(x), g = cuda::with_unit_stride(gate),
                   dy = cuda::with_unit_stride(grad_y);
  at::Tensor dx = at::empty(x.sizes(), x.options());
  cuda::gated_product_backward(shape_of(x), cuda::input_rows(in), cuda::input_rows(g),
                               cuda::input_rows(dy), cuda::output_rows(dx),
                               cuda::output_rows(grad_gate), cuda::output_rows(y), on.stream());
  return dx;
}

std::pair<at::Tensor, at::Tensor> backward(const at::Tensor& x, const at::Tensor& gate,
                                           const at::Tensor& grad_y) {
  const at::Tensor d_gate = at::empty(gate.sizes(), gate.options());
  return {backward_into(x, gate, grad_y, d_gate, {}), d_gate};
}

std::tuple<at::Tensor, at::Tensor, at::Tensor> backward_again(const at::Tensor& x,
                                                              const at::Tensor& gate,
                                                              const at::Tensor& grad_y) {
  const at::Tensor y = at::empty(x.sizes(), x.options()),
                   d_gate = at::empty(gate.sizes(), gate.options());
  return {backward_into(x, gate, grad_y, d_gate, y), d_gate, y};
}

}  // namespace

}  // namespace heddle::ops::output_gate_cuda

namespace heddle::ops::cuda {

void add_output_gate(Registry& registry) {
  using namespace output_gate_cuda;
  registry.add<OutputGate>(KernelInfo::cuda("cuda.fused"),
                           {forward, backward, backward_again, backward_into});
}

}  // namespace heddle::ops::cuda
