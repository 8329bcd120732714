// Joins the CUDA kernels of the norm with ATen.
#include <ATen/ops/empty.h>
#include <fmt/format.h>

#include "ops/cuda/kernels.h"
#include "ops/cuda/tensor.h"
#include "ops/rms_norm/cuda/rms_norm.h"
#include "ops/rms_norm/kernels.h"

namespace heddle::ops::rms_norm_cuda {
namespace {

using cuda::Element;

/// [rows, width] over the same memory where the strides allow it.
at::Tensor matrix(const at::Tensor& x) {
  return x.defined() ? cuda::with_unit_stride(x).reshape({-1, x.size(-1)}) : x;
}

cuda::RmsNormShape shape_of(const at::Tensor& x, const NormWeight& weight) {
  const std::int64_t width = x.size(-1);
  return {cuda::element_of(x), cuda::element_of(weight.value), width == 0 ? 0 : x.numel() / width,
          width, weight.offset};
}

RmsNorm::Forward forward(const at::Tensor& x, const at::Tensor& residual, const NormWeight& weight,
                         double eps) {
  const cuda::OnDevice on(x);
  const cuda::RmsNormShape shape = shape_of(x, weight);
  const at::Tensor rows = matrix(x), added = matrix(residual), w = weight.value.contiguous();
  std::vector<std::int64_t> leading = x.sizes().vec();
  leading.pop_back();
  RmsNorm::Forward result;
  result.y = at::empty(x.sizes(), x.options());
  if (residual.defined()) result.sum = at::empty(x.sizes(), x.options());
  result.rstd = at::empty(leading, x.options().dtype(at::kFloat));
  cuda::rms_norm_forward(shape, cuda::input_rows(rows), cuda::input_rows(added), w.const_data_ptr(),
                         static_cast<float>(eps), result.y.mutable_data_ptr(),
                         residual.defined() ? result.sum.mutable_data_ptr() : nullptr,
                         result.rstd.mutable_data_ptr<float>(), on.stream());
  return result;
}

/// `y`, unless undefined, takes the output.
std::pair<at::Tensor, at::Tensor> gradients(const at::Tensor& input, const NormWeight& weight,
                                            const at::Tensor& rstd, const at::Tensor& grad_y,
                                            const at::Tensor& grad_sum, const at::Tensor& y) {
  const cuda::OnDevice on(input);
  const cuda::RmsNormShape shape = shape_of(input, weight);
  const at::Tensor rows = matrix(input), dy = matrix(grad_y), ds = matrix(grad_sum),
                   w = weight.value.contiguous();
  at::Tensor dx = at::empty(input.sizes(), input.options());
  at::Tensor dw = at::empty(weight.value.sizes(), weight.value.options());
  const at::Tensor workspace = cuda::workspace_on(input, cuda::rms_norm_backward_workspace(shape));
  cuda::rms_norm_backward(shape, cuda::input_rows(rows), w.const_data_ptr(),
                          rstd.const_data_ptr<float>(), cuda::input_rows(dy), cuda::input_rows(ds),
                          dx.mutable_data_ptr(), dw.mutable_data_ptr(),
                          y.defined() ? y.mutable_data_ptr() : nullptr,
                          workspace.mutable_data_ptr<float>(), on.stream());
  return {dx, dw};
}

std::pair<at::Tensor, at::Tensor> backward(const at::Tensor& input, const NormWeight& weight,
                                           const at::Tensor& rstd, const at::Tensor& grad_y,
                                           const at::Tensor& grad_sum) {
  return gradients(input, weight, rstd, grad_y, grad_sum, {});
}

std::tuple<at::Tensor, at::Tensor, at::Tensor> backward_again(const at::Tensor& input,
                                                              const NormWeight& weight,
                                                              const at::Tensor& rstd,
                                                              const at::Tensor& grad_y,
                                                              const at::Tensor& grad_sum) {
  const at::Tensor y = at::empty(input.sizes(), input.options());
  auto [dx, dw] = gradients(input, weight, rstd, grad_y, grad_sum, y);
  return {dx, dw, y};
}

std::optional<std::string> refuse(const RmsNorm::Dims& dims) {
  const std::int64_t limit =
      dims.dim % 8 == 0 ? cuda::kRmsNormLongestRow : cuda::kRmsNormLongestOddRow;
  if (dims.dim <= limit) return std::nullopt;
  return fmt::format("rows of {} elements, at most {} fit the registers of a block", dims.dim,
                     limit);
}

}  // namespace

}  // namespace heddle::ops::rms_norm_cuda

namespace heddle::ops::cuda {

void add_rms_norm(Registry& registry) {
  using namespace rms_norm_cuda;
  KernelInfo info = KernelInfo::cuda("cuda.fused");
  info.falls_back = "linear's cuda.sm90_or_cublas where a step of generation has up to 16 rows";
  registry.add<RmsNorm>(info, {forward, backward, backward_again}, {.refuse = refuse});
}

}  // namespace heddle::ops::cuda
