#include <ATen/TensorOperators.h>
#include <ATen/ops/empty.h>
#include <ATen/ops/index_select.h>
#include <ATen/ops/mm.h>
#include <ATen/ops/sigmoid.h>
#include <ATen/ops/zeros.h>

#include "ops/compute_type.h"
#include "ops/moe/kernels.h"

namespace heddle::ops::moe_experts_reference {
namespace {

template <class F>
void for_each_expert(const MoeOrder& order, F&& f) {
  for (std::size_t e = 0; e + 1 < order.starts.size(); ++e) {
    const std::int64_t begin = order.starts[e], count = order.starts[e + 1] - begin;
    if (count > 0) f(static_cast<std::int64_t>(e), begin, count);
  }
}

/// silu(gate) * up of rows [gate | up], in the dtype of the rows.
at::Tensor activation(const at::Tensor& gate_up) {
  const std::int64_t width = gate_up.size(1) / 2;
  const at::Tensor g = gate_up.narrow(1, 0, width).to(compute_type(gate_up));
  return (g * at::sigmoid(g) * gate_up.narrow(1, width, width)).to(gate_up.scalar_type());
}

/// Gradient of [gate | up] from that of the activation.
at::Tensor activation_backward(const at::Tensor& gate_up, const at::Tensor& grad) {
  const c10::ScalarType type = compute_type(gate_up);
  const std::int64_t width = gate_up.size(1) / 2;
  const at::Tensor g = gate_up.narrow(1, 0, width).to(type), dy = grad.to(type);
  const at::Tensor s = at::sigmoid(g);
  at::Tensor result = at::empty(gate_up.sizes(), gate_up.options());
  result.narrow(1, 0, width).copy_(dy * gate_up.narrow(1, width, width) * s * (1 + g * (1 - s)));
  result.narrow(1, width, width).copy_(dy * g * s);
  return result;
}

}  // namespace

MoeExperts::Forward forward(const MoeExperts::Inputs& in, bool keep) {
  const MoeOrder order = moe_order(in.experts, in.gate_up.size(0), in.assignments);
  const std::int64_t hidden = in.x.size(1), n = order.source.size(0);
  const at::Tensor rows = at::index_select(in.x, 0, order.token);
  at::Tensor gate_up = at::empty({n, in.gate_up.size(1)}, in.x.options());
  at::Tensor out = at::empty({n, hidden}, in.x.options());
  const ChangedExperts changed(order, in.changes);
  const Tensors low_1 = changed.lows(&ExpertChanges::gate_up),
                low_2 = changed.lows(&ExpertChanges::down);
  changed.send_lows(in.x, low_1);
  at::Tensor hidden_rows = at::empty({n, in.down.size(2)}, in.x.options());
  for_each_expert(order, [&](std::int64_t e, std::int64_t begin, std::int64_t count) {
    const at::Tensor x = rows.narrow(0, begin, count);
    at::Tensor expert_gate_up = gate_up.narrow(0, begin, count);
    expert_gate_up.copy_(at::mm(x, in.gate_up.select(0, e).t()));
    changed.add(&ExpertChanges::gate_up, e, rows, low_1, gate_up);
    at::Tensor h = hidden_rows.narrow(0, begin, count);
    h.copy_(activation(expert_gate_up));
    at::Tensor expert_out = out.narrow(0, begin, count);
    expert_out.copy_(at::mm(h, in.down.select(0, e).t()));
    changed.add(&ExpertChanges::down, e, hidden_rows, low_2, out);
  });
  MoeExperts::Forward result;
  result.y = combine_rows(out, in.weights, order.place, order.top_k);
  changed.sum_lows(low_2, in.weights, result.y);
  if (!keep) return result;
  result.saved = {gate_up, out};
  for (const Tensors* const lows : {&low_1, &low_2})
    result.saved.insert(result.saved.end(), lows->begin(), lows->end());
  return result;
}

MoeExperts::Gradients backward(const MoeExperts::Inputs& in, const MoeExperts::Forward& saved,
                               const at::Tensor& grad_y, bool want_weight_gradients,
                               const at::Tensor& grad_branch) {
  const MoeOrder order = moe_order(in.experts, in.gate_up.size(0), in.assignments);
  const std::int64_t hidden = in.x.size(1), n = order.source.size(0);
  const at::Tensor &gate_up = saved.saved[0], &out = saved.saved[1];
  const auto lows = saved.saved.begin() + 2, middle = lows + std::ssize(in.changes);
  const Tensors low_1(lows, middle), low_2(middle, saved.saved.end());
  const at::Tensor rows = at::index_select(in.x, 0, order.token);

  const CombineGradients combined = combine_rows_backward(out, in.weights, order, grad_y);
  const at::Tensor& d_out = combined.rows;
  MoeExperts::Gradients result;
  result.weights = combined.weights;
  at::Tensor dx = at::empty({n, hidden}, in.x.options());
  if (want_weight_gradients) {
    result.gate_up = at::zeros(in.gate_up.sizes(), in.gate_up.options());
    result.down = at::zeros(in.down.sizes(), in.down.options());
  }
  const ChangedExperts changed(order, in.changes);
  result.changes = changed.zeros();
  const Tensors d_low_1 = changed.lows(&ExpertChanges::gate_up),
                d_low_2 = changed.lows(&ExpertChanges::down);
  changed.sum_lows_backward(low_2, in.weights, grad_y, d_low_2, result.weights, result.changes);
  const at::Tensor hidden_rows = activation(gate_up);
  at::Tensor d_hidden_rows = at::empty(hidden_rows.sizes(), hidden_rows.options()),
             d_gate_up_rows = at::empty(gate_up.sizes(), gate_up.options());
  for_each_expert(order, [&](std::int64_t e, std::int64_t begin, std::int64_t count) {
    const at::Tensor expert_gate_up = gate_up.narrow(0, begin, count);
    const at::Tensor expert_d_out = d_out.narrow(0, begin, count);
    at::Tensor d_hidden = d_hidden_rows.narrow(0, begin, count);
    d_hidden.copy_(at::mm(expert_d_out, in.down.select(0, e)));
    changed.add_backward(&ExpertChanges::down, e, hidden_rows, low_2, d_out, d_hidden_rows, d_low_2,
                         result.changes);
    at::Tensor d_gate_up = d_gate_up_rows.narrow(0, begin, count);
    d_gate_up.copy_(activation_backward(expert_gate_up, d_hidden));
    at::Tensor expert_dx = dx.narrow(0, begin, count);
    expert_dx.copy_(at::mm(d_gate_up, in.gate_up.select(0, e)));
    changed.add_backward(&ExpertChanges::gate_up, e, rows, low_1, d_gate_up_rows, dx, d_low_1,
                         result.changes);
    if (!want_weight_gradients) return;
    result.down.select(0, e).copy_(at::mm(expert_d_out.t(), hidden_rows.narrow(0, begin, count)));
    result.gate_up.select(0, e).copy_(at::mm(d_gate_up.t(), rows.narrow(0, begin, count)));
  });
  result.x = sum_rows(dx, order.place, order.top_k);
  changed.send_lows_backward(in.x, d_low_1, result.x, result.changes);
  if (grad_branch.defined()) result.x = result.x + grad_branch;
  return result;
}

}  // namespace heddle::ops::moe_experts_reference
