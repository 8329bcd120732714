// Joins the CUDA kernels of the convolution with ATen.
#include <ATen/ops/empty.h>
#include <ATen/ops/zeros.h>
#include <fmt/format.h>

#include "ops/causal_conv1d/cuda/causal_conv1d.h"
#include "ops/causal_conv1d/kernels.h"
#include "ops/cuda/kernels.h"
#include "ops/cuda/tensor.h"

namespace heddle::ops::causal_conv1d_cuda {
namespace {

/// The inputs as the kernels take them; holds what had to be made contiguous.
struct Prepared {
  at::Tensor weight, initial_state;
  cuda::CausalConv1dShape shape;
  cuda::CausalConv1dInputs inputs;

  explicit Prepared(const CausalConv1d::Inputs& in)
      : weight(in.weight.contiguous()),
        initial_state(in.initial_state.defined() ? in.initial_state.contiguous() : at::Tensor()),
        shape{cuda::element_of(in.x), cuda::element_of(in.weight), in.x.size(0),
              in.x.size(1),           in.weight.size(1),           in.sequences.count()} {
    TORCH_CHECK(in.sequences.cu_seqlens.is_cuda(), "causal_conv1d: cu_seqlens is on ",
                in.sequences.cu_seqlens.device(), ", x on ", in.x.device());
    inputs.x = cuda::input_rows(in.x);
    inputs.weight = weight.const_data_ptr();
    inputs.cu_seqlens = in.sequences.cu_seqlens.const_data_ptr<int>();
    inputs.initial_state = initial_state.defined() ? initial_state.const_data_ptr() : nullptr;
  }

  std::vector<std::int64_t> state_sizes() const {
    return {shape.sequences, shape.channels, shape.width - 1};
  }
};

std::pair<at::Tensor, at::Tensor> forward(const CausalConv1d::Inputs& in) {
  const cuda::OnDevice on(in.x);
  const Prepared prepared(in);
  at::Tensor y = at::empty(in.x.sizes(), in.x.options());
  at::Tensor final_state;
  if (in.want_final_state) final_state = at::empty(prepared.state_sizes(), in.x.options());
  cuda::causal_conv1d_forward(prepared.shape, prepared.inputs, y.mutable_data_ptr(),
                              in.want_final_state ? final_state.mutable_data_ptr() : nullptr,
                              on.stream());
  return {y, final_state};
}

CausalConv1d::Gradients backward(const CausalConv1d::Inputs& in, const at::Tensor& grad_y,
                                 const at::Tensor& grad_final_state) {
  const cuda::OnDevice on(in.x);
  const Prepared prepared(in);
  const at::Tensor dy =
      grad_y.defined() ? cuda::with_unit_stride(grad_y) : at::zeros(in.x.sizes(), in.x.options());
  const at::Tensor d_final =
      grad_final_state.defined() ? grad_final_state.contiguous() : at::Tensor();
  CausalConv1d::Gradients grads;
  grads.x = at::empty(in.x.sizes(), in.x.options());
  at::Tensor workspace;
  if (in.wants_weight_gradient) {
    grads.weight = at::empty(in.weight.sizes(), in.weight.options());
    workspace = cuda::workspace_on(in.x, cuda::causal_conv1d_backward_workspace(prepared.shape));
  }
  if (in.initial_state.defined()) {
    grads.initial_state = at::empty(prepared.state_sizes(), in.x.options());
  }
  cuda::causal_conv1d_backward(
      prepared.shape, prepared.inputs, cuda::input_rows(dy),
      d_final.defined() ? d_final.const_data_ptr() : nullptr, grads.x.mutable_data_ptr(),
      grads.weight.defined() ? grads.weight.mutable_data_ptr() : nullptr,
      grads.initial_state.defined() ? grads.initial_state.mutable_data_ptr() : nullptr,
      workspace.defined() ? workspace.mutable_data_ptr<float>() : nullptr, on.stream());
  return grads;
}

}  // namespace

}  // namespace heddle::ops::causal_conv1d_cuda

namespace heddle::ops::cuda {

void add_causal_conv1d(Registry& registry) {
  using namespace causal_conv1d_cuda;
  registry.add<CausalConv1d>(KernelInfo::cuda("cuda.fused"), {forward, backward});
}

}  // namespace heddle::ops::cuda
