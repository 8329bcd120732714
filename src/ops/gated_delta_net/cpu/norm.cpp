#include "ops/gated_delta_net/cpu/norm.h"

#include <ATen/Parallel.h>
#include <ATen/ops/empty.h>
#include <ATen/ops/sum.h>
#include <ATen/ops/zeros.h>

#include <algorithm>

#include <fmt/format.h>

#include "ops/compute_type.h"
#include "ops/gated_delta_net/cpu/norm_kernels.h"
#include "ops/gated_delta_net/cpu/rows.h"

namespace heddle::ops::gdn_cpu {
namespace {

constexpr std::int64_t kBlockRows = 512;

const NormKernels& chosen_norm_kernels() { return HEDDLE_CPU_SELECT(norm_kernels)(); }

struct NormCall {
  at::Tensor x, z, weight;
  NormArgs args{};
  std::int64_t rows;

  NormCall(const at::Tensor& x_in, const at::Tensor& z_in, const at::Tensor& weight_in, double eps)
      : x(head_rows(x_in)),
        z(head_rows(z_in)),
        weight(weight_in.to(compute_type(x_in)).contiguous()),
        rows(x_in.size(0) * x_in.size(1)) {
    const auto reason = refuse_norm({.dim = x.size(2)});
    TORCH_CHECK(!reason, "gated_rms_norm cpu.vector: ", reason.value_or(""));
    args.H = x.size(1);
    args.V = x.size(2);
    args.eps = eps;
    args.x = x.const_data_ptr();
    args.z = z.const_data_ptr();
    args.x_stride = x.stride(0);
    args.z_stride = z.stride(0);
    args.weight = weight.const_data_ptr();
  }
  at::Tensor like_x() const { return at::empty(x.sizes(), x.options()); }
};

}  // namespace

std::optional<std::string> refuse_norm(const GatedRmsNorm::Dims& dims) {
  if (dims.dim % 16 == 0) return std::nullopt;
  return fmt::format("dim must be a multiple of 16, it is {}", dims.dim);
}

std::pair<at::Tensor, at::Tensor> norm_forward(const at::Tensor& x, const at::Tensor& z,
                                               const at::Tensor& weight, double eps) {
  NormCall call(x, z, weight, eps);
  const at::Tensor y = call.like_x();
  const at::Tensor rstd = at::empty({x.size(0), x.size(1)}, x.options().dtype(compute_type(x)));
  call.args.y = y.mutable_data_ptr();
  call.args.rstd = rstd.mutable_data_ptr();
  const auto work = chosen_norm_kernels().forward[cpu_element(x)];
  at::parallel_for(0, call.rows, kBlockRows,
                   [&](std::int64_t first, std::int64_t last) { work(call.args, first, last); });
  return {y, rstd};
}

GatedRmsNorm::Gradients norm_backward(const GatedRmsNorm::Backward& in) {
  const auto& [x, z, weight, rstd, grad_y, wants_weight, wants_y] = in;
  NormCall call(x, z, weight, 0);
  const at::Tensor dy = grad_y.contiguous(), dx = call.like_x(), dz = call.like_x();
  const std::int64_t blocks = (call.rows + kBlockRows - 1) / kBlockRows;
  const at::Tensor dw = at::zeros({blocks, call.args.V}, rstd.options());
  call.args.rstd = rstd.mutable_data_ptr();
  call.args.dy = dy.const_data_ptr();
  call.args.dx = dx.mutable_data_ptr();
  call.args.dz = dz.mutable_data_ptr();
  const auto work = chosen_norm_kernels().backward[cpu_element(x)];
  char* sums = static_cast<char*>(dw.mutable_data_ptr());
  const std::int64_t bytes = call.args.V * static_cast<std::int64_t>(dw.element_size());
  at::parallel_for(0, blocks, 1, [&](std::int64_t first, std::int64_t last) {
    for (std::int64_t b = first; b < last; ++b) {
      work(call.args, b * kBlockRows, std::min(call.rows, (b + 1) * kBlockRows), sums + b * bytes);
    }
  });
  return {dx, dz, at::sum(dw, {0}).to(weight.scalar_type()), {}};
}

}  // namespace heddle::ops::gdn_cpu
