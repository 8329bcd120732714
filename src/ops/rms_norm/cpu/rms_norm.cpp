#include <ATen/Parallel.h>
#include <ATen/TensorOperators.h>
#include <ATen/ops/empty.h>
#include <ATen/ops/zeros.h>

#include <algorithm>

#include "ops/compute_type.h"
#include "ops/rms_norm/cpu/vector/rms_norm_rows.h"
#include "ops/rms_norm/kernels.h"
#include "ops/row_blocks.h"

namespace heddle::ops::rms_norm_cpu {
namespace {

std::int64_t grain(std::int64_t width) { return std::max<std::int64_t>(1, 16384 / width); }

}  // namespace

RmsNorm::Forward forward(const at::Tensor& x, const at::Tensor& residual, const NormWeight& weight,
                         double eps) {
  const c10::ScalarType type = compute_type(x);
  const at::Tensor input = x.contiguous();
  const at::Tensor added = residual.defined() ? residual.contiguous() : residual;
  const at::Tensor scale = weight.scale(type).contiguous();
  RmsNorm::Forward result;
  result.y = at::empty(x.sizes(), x.options());
  result.rstd =
      at::empty(x.sizes().slice(0, static_cast<std::size_t>(x.dim()) - 1), x.options().dtype(type));
  RmsNormRows rows;
  rows.x = input.const_data_ptr();
  rows.scale = scale.const_data_ptr();
  rows.y = result.y.mutable_data_ptr();
  rows.rstd = result.rstd.mutable_data_ptr();
  rows.eps = eps;
  rows.width = x.size(-1);
  if (residual.defined()) {
    result.sum = at::empty(x.sizes(), x.options());
    rows.residual = added.const_data_ptr();
    rows.sum = result.sum.mutable_data_ptr();
  }
  const RmsNormKernels kernels = HEDDLE_CPU_SELECT(rms_norm_kernels)(cpu_element(x));
  at::parallel_for(
      0, result.rstd.numel(), grain(rows.width),
      [&](std::int64_t begin, std::int64_t end) { kernels.forward(rows, begin, end); });
  return result;
}

RmsNorm::Gradients backward(const RmsNorm::Backward& in) {
  const auto& [input, weight, rstd, grad_y, grad_y_2, grad_sum, wants_weight, wants_y] = in;
  const c10::ScalarType type = compute_type(input);
  const at::Tensor x = input.contiguous(), dy = grad_y.contiguous();
  const at::Tensor ds = grad_sum.defined() ? grad_sum.contiguous() : grad_sum;
  const at::Tensor scale = weight.scale(type).contiguous();
  at::Tensor dx = at::empty(input.sizes(), input.options());
  at::Tensor dw = at::empty(weight.value.sizes(), weight.value.options().dtype(type));
  RmsNormRows rows;
  rows.x = x.const_data_ptr();
  rows.scale = scale.const_data_ptr();
  rows.rstd = const_cast<void*>(rstd.const_data_ptr());  // read only in the backward
  rows.grad_y = dy.const_data_ptr();
  rows.grad_sum = ds.defined() ? ds.const_data_ptr() : nullptr;
  rows.grad_x = dx.mutable_data_ptr();
  rows.width = input.size(-1);
  const RmsNormKernels kernels = HEDDLE_CPU_SELECT(rms_norm_kernels)(cpu_element(input));
  const std::int64_t count = rstd.numel();
  at::Tensor partial = at::zeros({row_block_count(count), rows.width}, dw.options());
  const auto run = [&](auto* grad_weight) {
    sum_over_row_blocks(count, partial, grad_weight,
                        [&](std::int64_t begin, std::int64_t end, auto* line) {
                          RmsNormRows block = rows;
                          block.grad_weight = line;
                          kernels.backward(block, begin, end);
                        });
  };
  if (type == at::kDouble) {
    run(dw.mutable_data_ptr<double>());
  } else {
    run(dw.mutable_data_ptr<float>());
  }
  return {dx, dw.to(weight.value.scalar_type()), {}};
}

}  // namespace heddle::ops::rms_norm_cpu
