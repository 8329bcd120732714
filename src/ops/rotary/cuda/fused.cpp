// Joins the CUDA kernels of the query and key norm with ATen.
#include <ATen/ops/empty.h>
#include <fmt/format.h>

#include "ops/cuda/kernels.h"
#include "ops/cuda/tensor.h"
#include "ops/rotary/cuda/qk_norm_rope.h"
#include "ops/rotary/kernels.h"

namespace heddle::ops::qk_norm_rope_cuda {
namespace {

/// Inputs of both directions, contiguous and in the kernels' types.
struct Prepared {
  at::Tensor x, weight, cos, sin;
  cuda::QkNormRopeShape shape;

  Prepared(const at::Tensor& x_THD, const NormWeight& w, const at::Tensor& c, const at::Tensor& s)
      : x(cuda::with_unit_stride(x_THD)),
        weight(w.value.contiguous()),
        cos(c.to(at::kFloat).contiguous()),
        sin(s.to(at::kFloat).contiguous()),
        shape{cuda::element_of(x),
              cuda::element_of(weight),
              x.size(0),
              x.size(1),
              x.size(2),
              cos.size(1),
              w.offset} {}
};

std::pair<at::Tensor, at::Tensor> forward(const at::Tensor& x, const NormWeight& weight,
                                          const at::Tensor& cos, const at::Tensor& sin,
                                          double eps) {
  const cuda::OnDevice on(x);
  const Prepared in(x, weight, cos, sin);
  at::Tensor y = at::empty(x.sizes(), x.options());
  at::Tensor rstd = at::empty({x.size(0), x.size(1)}, x.options().dtype(at::kFloat));
  cuda::qk_norm_rope_forward(in.shape, cuda::input_rows(in.x), in.weight.const_data_ptr(),
                             in.cos.const_data_ptr<float>(), in.sin.const_data_ptr<float>(),
                             static_cast<float>(eps), y.mutable_data_ptr(),
                             rstd.mutable_data_ptr<float>(), on.stream());
  return {y, rstd};
}

at::Tensor backward_into(const at::Tensor& x, const NormWeight& weight, const at::Tensor& cos,
                         const at::Tensor& sin, const at::Tensor& rstd, const at::Tensor& grad_y,
                         bool wants_weight, at::Tensor grad_x) {
  const cuda::OnDevice on(x);
  const Prepared in(x, weight, cos, sin);
  const at::Tensor dy = cuda::with_unit_stride(grad_y);
  at::Tensor dw, workspace;
  if (wants_weight) {
    dw = at::empty(weight.value.sizes(), weight.value.options());
    workspace = cuda::workspace_on(x, cuda::qk_norm_rope_backward_workspace(in.shape));
  }
  cuda::qk_norm_rope_backward(
      in.shape, cuda::input_rows(in.x), in.weight.const_data_ptr(), in.cos.const_data_ptr<float>(),
      in.sin.const_data_ptr<float>(), rstd.const_data_ptr<float>(), cuda::input_rows(dy),
      cuda::output_rows(grad_x), wants_weight ? dw.mutable_data_ptr() : nullptr,
      wants_weight ? workspace.mutable_data_ptr<float>() : nullptr, on.stream());
  return dw;
}

std::pair<at::Tensor, at::Tensor> backward(const at::Tensor& x, const NormWeight& weight,
                                           const at::Tensor& cos, const at::Tensor& sin,
                                           const at::Tensor& rstd, const at::Tensor& grad_y,
                                           bool wants_weight) {
  const at::Tensor dx = at::empty(x.sizes(), x.options());
  return {dx, backward_into(x, weight, cos, sin, rstd, grad_y, wants_weight, dx)};
}

std::optional<std::string> refuse(const QkNormRope::Dims& dims) {
  if (dims.head_dim <= cuda::kQkNormRopeLongestRow) return std::nullopt;
  return fmt::format("heads of {} elements, at most {} fit the registers of a warp", dims.head_dim,
                     cuda::kQkNormRopeLongestRow);
}

}  // namespace

}  // namespace heddle::ops::qk_norm_rope_cuda

namespace heddle::ops::cuda {

void add_qk_norm_rope(Registry& registry) {
  using namespace qk_norm_rope_cuda;
  registry.add<QkNormRope>(KernelInfo::cuda("cuda.fused"), {forward, backward, backward_into},
                           {.refuse = refuse});
}

}  // namespace heddle::ops::cuda
