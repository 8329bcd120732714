// Joins the CUDA kernels of SwiGLU with ATen.
#include <ATen/ops/empty.h>

#include "ops/cuda/gated_product.h"
#include "ops/cuda/kernels.h"
#include "ops/cuda/tensor.h"
#include "ops/swiglu/kernels.h"

namespace heddle::ops::swiglu_cuda {
namespace {

cuda::GatedProductShape shape_of(const at::Tensor& gate) {
  return {cuda::GateActivation::kSilu, cuda::element_of(gate), gate.size(0), 1, gate.size(1)};
}

/// Whether gate and up are the two halves of one [T,2F] tensor: then their gradients are too, and
/// joining them needs no copy.
bool halves_of_one(const at::Tensor& gate, const at::Tensor& up) {
  return gate.numel() > 0 && gate.is_alias_of(up) && gate.stride(0) == 2 * gate.size(1) &&
         gate.strides() == up.strides() && gate.stride(1) == 1 &&
         up.storage_offset() == gate.storage_offset() + gate.size(1);
}

at::Tensor forward(const at::Tensor& gate, const at::Tensor& up) {
  const cuda::OnDevice on(gate);
  const at::Tensor g = cuda::with_unit_stride(gate), u = cuda::with_unit_stride(up);
  at::Tensor y = at::empty(gate.sizes(), gate.options());
  cuda::gated_product_forward(shape_of(gate), cuda::input_rows(u), cuda::input_rows(g),
                              cuda::output_rows(y), on.stream());
  return y;
}

/// `y`, unless undefined, takes the output.
std::pair<at::Tensor, at::Tensor> gradients(const at::Tensor& gate, const at::Tensor& up,
                                            const at::Tensor& grad_y, const at::Tensor& y) {
  const cuda::OnDevice on(gate);
  const at::Tensor g = cuda::with_unit_stride(gate), u = cuda::with_unit_stride(up),
                   dy = cuda::with_unit_stride(grad_y);
  at::Tensor d_gate, d_up;
  if (halves_of_one(gate, up)) {
    const std::int64_t width = gate.size(1);
    const at::Tensor both = at::empty({gate.size(0), 2 * width}, gate.options());
    d_gate = both.narrow(1, 0, width);
    d_up = both.narrow(1, width, width);
  } else {
    d_gate = at::empty(gate.sizes(), gate.options());
    d_up = at::empty(up.sizes(), up.options());
  }
  cuda::gated_product_backward(shape_of(gate), cuda::input_rows(u), cuda::input_rows(g),
                               cuda::input_rows(dy), cuda::output_rows(d_up),
                               cuda::output_rows(d_gate), cuda::output_rows(y), on.stream());
  return {d_gate, d_up};
}

std::pair<at::Tensor, at::Tensor> backward(const at::Tensor& gate, const at::Tensor& up,
                                           const at::Tensor& grad_y) {
  return gradients(gate, up, grad_y, {});
}

std::tuple<at::Tensor, at::Tensor, at::Tensor> backward_again(const at::Tensor& gate,
                                                              const at::Tensor& up,
                                                              const at::Tensor& grad_y) {
  const at::Tensor y = at::empty(gate.sizes(), gate.options());
  auto [d_gate, d_up] = gradients(gate, up, grad_y, y);
  return {d_gate, d_up, y};
}

}  // namespace

}  // namespace heddle::ops::swiglu_cuda

namespace heddle::ops::cuda {

void add_swiglu(Registry& registry) {
  using namespace swiglu_cuda;
  KernelInfo info = KernelInfo::cuda("cuda.fused");
  info.falls_back = "linear's cuda.sm90_or_cublas for up to 16 rows without gradient";
  registry.add<Swiglu>(info, {forward, backward, backward_again});
}

}  // namespace heddle::ops::cuda
