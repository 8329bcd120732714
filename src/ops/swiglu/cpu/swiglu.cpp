#include <ATen/Parallel.h>
#include <ATen/ops/empty.h>

#include <algorithm>

#include "ops/compute_type.h"
#include "ops/swiglu/cpu/vector/swiglu_rows.h"
#include "ops/swiglu/kernels.h"

namespace heddle::ops::swiglu_cpu {
namespace {

at::Tensor with_unit_stride(const at::Tensor& x) { return x.stride(1) == 1 ? x : x.contiguous(); }

std::int64_t grain(std::int64_t width) { return std::max<std::int64_t>(1, 8192 / (width + 1)); }

}  // namespace

at::Tensor forward(const at::Tensor& gate, const at::Tensor& up) {
  const at::Tensor g = with_unit_stride(gate), u = with_unit_stride(up);
  at::Tensor y = at::empty(gate.sizes(), gate.options());
  SwigluRows rows;
  rows.gate = g.const_data_ptr();
  rows.up = u.const_data_ptr();
  rows.gate_stride = g.stride(0);
  rows.up_stride = u.stride(0);
  rows.y = y.mutable_data_ptr();
  rows.width = gate.size(1);
  const SwigluKernels kernels = HEDDLE_CPU_SELECT(swiglu_kernels)(cpu_element(gate));
  at::parallel_for(0, gate.size(0), grain(rows.width), [&](std::int64_t begin, std::int64_t end) {
    kernels.forward(rows, begin, end);
  });
  return y;
}

std::pair<at::Tensor, at::Tensor> backward(const at::Tensor& gate, const at::Tensor& up,
                                           const at::Tensor& grad_y) {
  const at::Tensor g = with_unit_stride(gate), u = with_unit_stride(up);
  const at::Tensor dy = grad_y.contiguous();
  at::Tensor d_gate = at::empty(gate.sizes(), gate.options());
  at::Tensor d_up = at::empty(up.sizes(), up.options());
  SwigluRows rows;
  rows.gate = g.const_data_ptr();
  rows.up = u.const_data_ptr();
  rows.gate_stride = g.stride(0);
  rows.up_stride = u.stride(0);
  rows.grad_y = dy.const_data_ptr();
  rows.grad_gate = d_gate.mutable_data_ptr();
  rows.grad_up = d_up.mutable_data_ptr();
  rows.grad_gate_stride = rows.grad_up_stride = rows.width = gate.size(1);
  const SwigluKernels kernels = HEDDLE_CPU_SELECT(swiglu_kernels)(cpu_element(gate));
  at::parallel_for(0, gate.size(0), grain(rows.width), [&](std::int64_t begin, std::int64_t end) {
    kernels.backward(rows, begin, end);
  });
  return {d_gate, d_up};
}

}  // namespace heddle::ops::swiglu_cpu
