// Joins the CUDA kernels of the gates and of the gated norm with ATen.
#include <ATen/ops/empty.h>
#include <fmt/format.h>

#include "ops/cuda/kernels.h"
#include "ops/cuda/tensor.h"
#include "ops/gated_delta_net/cuda/gated_rms_norm.h"
#include "ops/gated_delta_net/cuda/gates.h"
#include "ops/gated_delta_net/kernels.h"

namespace heddle::ops {
namespace gdn_gates_cuda {
namespace {

cuda::GdnGatesShape shape_of(const at::Tensor& a, const at::Tensor& a_log,
                             const at::Tensor& dt_bias) {
  return {cuda::element_of(a), cuda::element_of(a_log), cuda::element_of(dt_bias), a.size(0),
          a.size(1)};
}

std::pair<at::Tensor, at::Tensor> forward(const at::Tensor& a, const at::Tensor& b,
                                          const at::Tensor& a_log, const at::Tensor& dt_bias) {
  const cuda::OnDevice on(a);
  const at::Tensor a_rows = cuda::with_unit_stride(a), b_rows = cuda::with_unit_stride(b);
  const at::Tensor rate = a_log.contiguous(), bias = dt_bias.contiguous();
  at::Tensor g = at::empty(a.sizes(), a.options().dtype(at::kFloat));
  at::Tensor beta = at::empty(a.sizes(), a.options().dtype(at::kFloat));
  cuda::gdn_gates_forward(shape_of(a, rate, bias), cuda::input_rows(a_rows),
                          cuda::input_rows(b_rows), rate.const_data_ptr(), bias.const_data_ptr(),
                          g.mutable_data_ptr<float>(), beta.mutable_data_ptr<float>(), on.stream());
  return {g, beta};
}

std::vector<at::Tensor> backward(const at::Tensor& a, const at::Tensor& b, const at::Tensor& a_log,
                                 const at::Tensor& dt_bias, const at::Tensor& g,
                                 const at::Tensor& beta, const at::Tensor& grad_g,
                                 const at::Tensor& grad_beta, bool wants_parameters) {
  const cuda::OnDevice on(a);
  const at::Tensor a_rows = cuda::with_unit_stride(a);
  const at::Tensor rate = a_log.contiguous(), bias = dt_bias.contiguous();
  const cuda::GdnGatesShape shape = shape_of(a, rate, bias);
  std::vector<at::Tensor> grads(4);
  at::Tensor dg, d_beta;
  if (grad_g.defined()) {
    dg = grad_g.contiguous();
    grads[0] = at::empty(a.sizes(), a.options());
    if (wants_parameters) {
      grads[2] = at::empty(a_log.sizes(), a_log.options());
      grads[3] = at::empty(dt_bias.sizes(), dt_bias.options());
    }
  }
  if (grad_beta.defined()) {
    d_beta = grad_beta.contiguous();
    grads[1] = at::empty(b.sizes(), b.options());
  }
  const auto pointer = [](const at::Tensor& t) -> void* {
    return t.defined() ? t.mutable_data_ptr() : nullptr;
  };
  const auto values = [](const at::Tensor& t) {
    return t.defined() ? t.const_data_ptr<float>() : nullptr;
  };
  const at::Tensor workspace = cuda::workspace_on(a, cuda::gdn_gates_backward_workspace(shape));
  cuda::gdn_gates_backward(shape, cuda::input_rows(a_rows), rate.const_data_ptr(),
                           bias.const_data_ptr(), values(g), values(beta), values(dg),
                           values(d_beta), pointer(grads[0]), pointer(grads[1]), pointer(grads[2]),
                           pointer(grads[3]), workspace.mutable_data_ptr<float>(), on.stream());
  return grads;
}

std::optional<std::string> refuse(const GdnGates::Dims& dims) {
  if (dims.num_v_heads <= cuda::kGdnGatesMostHeads) return std::nullopt;
  return fmt::format("{} value heads, at most {} fit a block", dims.num_v_heads,
                     cuda::kGdnGatesMostHeads);
}

}  // namespace

}  // namespace gdn_gates_cuda

namespace gated_rms_norm_cuda {
namespace {

cuda::GatedRmsNormShape shape_of(const at::Tensor& x, const at::Tensor& weight) {
  return {cuda::element_of(x), cuda::element_of(weight), x.size(0), x.size(1), x.size(2)};
}

std::pair<at::Tensor, at::Tensor> forward(const at::Tensor& x, const at::Tensor& z,
                                          const at::Tensor& weight, double eps) {
  const cuda::OnDevice on(x);
  const at::Tensor x_rows = cuda::with_unit_stride(x), z_rows = cuda::with_unit_stride(z),
                   w = weight.contiguous();
  at::Tensor y = at::empty(x.sizes(), x.options());
  at::Tensor rstd = at::empty({x.size(0), x.size(1)}, x.options().dtype(at::kFloat));
  cuda::gated_rms_norm_forward(shape_of(x, w), cuda::input_rows(x_rows), cuda::input_rows(z_rows),
                               w.const_data_ptr(), static_cast<float>(eps), y.mutable_data_ptr(),
                               rstd.mutable_data_ptr<float>(), on.stream());
  return {y, rstd};
}

GatedRmsNorm::Gradients backward(const GatedRmsNorm::Backward& in) {
  const at::Tensor &x = in.x, &z = in.z;
  const cuda::OnDevice on(x);
  const at::Tensor x_rows = cuda::with_unit_stride(x), z_rows = cuda::with_unit_stride(z),
                   dy = cuda::with_unit_stride(in.grad_y), w = in.weight.contiguous();
  const cuda::GatedRmsNormShape shape = shape_of(x, w);
  GatedRmsNorm::Gradients result;
  result.x = at::empty(x.sizes(), x.options());
  result.z = at::empty(z.sizes(), z.options());
  if (in.wants_y) result.y = at::empty(x.sizes(), x.options());
  at::Tensor workspace;
  if (in.wants_weight) {
    result.weight = at::empty(w.sizes(), w.options());
    workspace = cuda::workspace_on(x, cuda::gated_rms_norm_backward_workspace(shape));
  }
  const auto place = [](const at::Tensor& t) {
    return t.defined() ? t.mutable_data_ptr() : nullptr;
  };
  cuda::gated_rms_norm_backward(
      shape, cuda::input_rows(x_rows), cuda::input_rows(z_rows), w.const_data_ptr(),
      in.rstd.const_data_ptr<float>(), cuda::input_rows(dy), place(result.x), place(result.z),
      place(result.weight), place(result.y),
      workspace.defined() ? workspace.mutable_data_ptr<float>() : nullptr, on.stream());
  return result;
}

std::optional<std::string> refuse(const GatedRmsNorm::Dims& dims) {
  if (dims.dim <= cuda::kGatedRmsNormLongestRow) return std::nullopt;
  return fmt::format("rows of {} elements, at most {} fit the registers of a warp", dims.dim,
                     cuda::kGatedRmsNormLongestRow);
}

}  // namespace

}  // namespace gated_rms_norm_cuda

}  // namespace heddle::ops

namespace heddle::ops::cuda {

void add_gated_delta_net(Registry& registry) {
  registry.add<GdnGates>(KernelInfo::cuda("cuda.fused"),
                         {gdn_gates_cuda::forward, gdn_gates_cuda::backward},
                         {.refuse = gdn_gates_cuda::refuse});
  registry.add<GatedRmsNorm>(KernelInfo::cuda("cuda.fused"),
                             {gated_rms_norm_cuda::forward, gated_rms_norm_cuda::backward,
                              /*gives_output_again=*/true},
                             {.refuse = gated_rms_norm_cuda::refuse});
}

}  // namespace heddle::ops::cuda
