#include <ATen/Parallel.h>
#include <ATen/TensorOperators.h>
#include <ATen/ops/empty.h>
#include <ATen/ops/zeros.h>

#include <algorithm>
#include <vector>

#include "ops/compute_type.h"
#include "ops/rotary/cpu/vector/qk_norm_rope_rows.h"
#include "ops/rotary/kernels.h"
#include "ops/row_blocks.h"

namespace heddle::ops::qk_norm_rope_cpu {
namespace {

/// Inputs of the rows, alive as long as their pointers are used.
struct Operands {
  Operands(const at::Tensor& x_in, const NormWeight& weight, const at::Tensor& cos_in,
           const at::Tensor& sin_in)
      : x(x_in.stride(2) == 1 ? x_in : x_in.contiguous()),
        scale(weight.scale(compute_type(x)).contiguous()),
        cos(cos_in.to(compute_type(x)).contiguous()),
        sin(sin_in.to(compute_type(x)).contiguous()) {
    rows.x = x.const_data_ptr();
    rows.token_stride = x.stride(0);
    rows.head_stride = x.stride(1);
    rows.scale = scale.const_data_ptr();
    rows.cos = cos.const_data_ptr();
    rows.sin = sin.const_data_ptr();
    rows.heads = x.size(1);
    rows.dim = x.size(2);
    rows.half = cos.size(1);
  }
  at::Tensor x, scale, cos, sin;
  QkNormRopeRows rows;
};

}  // namespace

std::pair<at::Tensor, at::Tensor> forward(const at::Tensor& x, const NormWeight& weight,
                                          const at::Tensor& cos, const at::Tensor& sin,
                                          double eps) {
  Operands operands(x, weight, cos, sin);
  QkNormRopeRows& rows = operands.rows;
  at::Tensor y = at::empty(x.sizes(), x.options());
  at::Tensor rstd = at::empty({x.size(0), x.size(1)}, x.options().dtype(compute_type(x)));
  rows.y = y.mutable_data_ptr();
  rows.rstd = rstd.mutable_data_ptr();
  rows.eps = eps;
  const QkNormRopeKernels kernels = HEDDLE_CPU_SELECT(qk_norm_rope_kernels)(cpu_element(x));
  const std::int64_t grain = std::max<std::int64_t>(1, 16384 / (rows.heads * rows.dim));
  at::parallel_for(0, x.size(0), grain, [&](std::int64_t begin, std::int64_t end) {
    kernels.forward(rows, begin, end);
  });
  return {y, rstd};
}

std::pair<at::Tensor, at::Tensor> backward(const at::Tensor& x, const NormWeight& weight,
                                           const at::Tensor& cos, const at::Tensor& sin,
                                           const at::Tensor& rstd, const at::Tensor& grad_y,
                                           bool wants_weight) {
  Operands operands(x, weight, cos, sin);
  QkNormRopeRows& rows = operands.rows;
  const at::Tensor dy = grad_y.contiguous();
  at::Tensor dx = at::empty(x.sizes(), x.options());
  at::Tensor dw = at::empty(weight.value.sizes(), operands.scale.options());
  rows.rstd = const_cast<void*>(rstd.const_data_ptr());  // read only in the backward
  rows.grad_y = dy.const_data_ptr();
  rows.grad_x = dx.mutable_data_ptr();
  const QkNormRopeKernels kernels = HEDDLE_CPU_SELECT(qk_norm_rope_kernels)(cpu_element(x));
  at::Tensor partial = at::zeros({row_block_count(x.size(0)), rows.dim}, dw.options());
  const auto run = [&](auto* grad_weight) {
    using C = std::remove_pointer_t<decltype(grad_weight)>;
    sum_over_row_blocks(x.size(0), partial, grad_weight,
                        [&](std::int64_t begin, std::int64_t end, C* line) {
                          std::vector<C> scratch(static_cast<std::size_t>(rows.dim));
                          QkNormRopeRows block = rows;
                          block.grad_weight = line;
                          block.scratch = scratch.data();
                          kernels.backward(block, begin, end);
                        });
  };
  if (dw.scalar_type() == at::kDouble) {
    run(dw.mutable_data_ptr<double>());
  } else {
    run(dw.mutable_data_ptr<float>());
  }
  return {dx, dw.to(weight.value.scalar_type())};
}

}  // namespace heddle::ops::qk_norm_rope_cpu
