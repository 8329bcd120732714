#include <ATen/Parallel.h>
#include <ATen/ops/empty.h>

#include <algorithm>

#include "ops/attention/cpu/vector/output_gate_rows.h"
#include "ops/attention/kernels.h"
#include "ops/compute_type.h"

namespace heddle::ops::output_gate_cpu {
namespace {

OutputGateRows rows_of(const at::Tensor& x, const at::Tensor& gate) {
  OutputGateRows rows;
  rows.x = x.const_data_ptr();
  rows.gate = gate.const_data_ptr();
  rows.token_stride = gate.stride(0);
  rows.head_stride = gate.stride(1);
  rows.heads = x.size(1);
  rows.dim = x.size(2);
  return rows;
}

std::int64_t grain(const OutputGateRows& rows) {
  return std::max<std::int64_t>(1, 8192 / (rows.heads * rows.dim + 1));
}

}  // namespace

at::Tensor forward(const at::Tensor& x_in, const at::Tensor& gate_in) {
  const at::Tensor x = x_in.contiguous();
  const at::Tensor gate = gate_in.stride(2) == 1 ? gate_in : gate_in.contiguous();
  at::Tensor y = at::empty(x.sizes(), x.options());
  OutputGateRows rows = rows_of(x, gate);
  rows.y = y.mutable_data_ptr();
  const OutputGateKernels kernels = HEDDLE_CPU_SELECT(output_gate_kernels)(cpu_element(x));
  at::parallel_for(0, x.size(0), grain(rows), [&](std::int64_t begin, std::int64_t end) {
    kernels.forward(rows, begin, end);
  });
  return y;
}

std::pair<at::Tensor, at::Tensor> backward(const at::Tensor& x_in, const at::Tensor& gate_in,
                                           const at::Tensor& grad_y) {
  const at::Tensor x = x_in.contiguous(), dy = grad_y.contiguous();
  const at::Tensor gate = gate_in.stride(2) == 1 ? gate_in : gate_in.contiguous();
  at::Tensor dx = at::empty(x.sizes(), x.options()), d_gate = at::empty(x.sizes(), x.options());
  OutputGateRows rows = rows_of(x, gate);
  rows.grad_y = dy.const_data_ptr();
  rows.grad_x = dx.mutable_data_ptr();
  rows.grad_gate = d_gate.mutable_data_ptr();
  const OutputGateKernels kernels = HEDDLE_CPU_SELECT(output_gate_kernels)(cpu_element(x));
  at::parallel_for(0, x.size(0), grain(rows), [&](std::int64_t begin, std::int64_t end) {
    kernels.backward(rows, begin, end);
  });
  return {dx, d_gate};
}

}  // namespace heddle::ops::output_gate_cpu
