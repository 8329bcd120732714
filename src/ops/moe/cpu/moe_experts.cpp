// Products by libtorch's BLAS, all between them in one pass each by the vector loops of swiglu.
#include <ATen/Parallel.h>
#include <ATen/ops/empty.h>
#include <ATen/ops/index_select.h>
#include <ATen/ops/mm.h>
#include <ATen/ops/zeros.h>

#include <algorithm>
#include <functional>
#include <vector>

#include "ops/autograd.h"
#include "ops/compute_type.h"
#include "ops/moe/cpu/vector/combine_rows.h"
#include "ops/moe/kernels.h"
#include "ops/swiglu/cpu/vector/swiglu_rows.h"

namespace heddle::ops::moe_experts_cpu {
namespace {

struct Expert {
  std::int64_t index, begin, count;
};

/// The rows of an expert.
at::Tensor part(const at::Tensor& t, const Expert& e) { return t.narrow(0, e.begin, e.count); }

std::vector<Expert> non_empty(const MoeOrder& order) {
  std::vector<Expert> experts;
  for (std::size_t e = 0; e + 1 < order.starts.size(); ++e) {
    const std::int64_t begin = order.starts[e], count = order.starts[e + 1] - begin;
    if (count > 0) experts.push_back({static_cast<std::int64_t>(e), begin, count});
  }
  return experts;
}

/// Many small experts: one thread each. Few or large ones: all threads inside each product.
void for_each_expert(const std::vector<Expert>& experts, std::int64_t rows,
                     const std::function<void(const Expert&)>& body) {
  const auto count = static_cast<std::int64_t>(experts.size());
  const std::int64_t threads = at::get_num_threads();
  std::int64_t largest = 0;
  for (const Expert& expert : experts) largest = std::max(largest, expert.count);
  // Alone on its thread the largest expert must not take longer than the fair share of all.
  if (count < 2 * threads || largest * threads > rows) {
    for (const Expert& expert : experts) body(expert);
    return;
  }
  at::parallel_for(0, count, 1, [&](std::int64_t first, std::int64_t last) {
    const NoGradient guard;  // the guard of the calling thread does not reach this one
    for (std::int64_t i = first; i < last; ++i) body(experts[static_cast<std::size_t>(i)]);
  });
}

/// rows [N,2I] = gate | up.
SwigluRows rows_of(const at::Tensor& gate_up) {
  const std::int64_t width = gate_up.size(1) / 2;
  SwigluRows rows;
  rows.gate = gate_up.const_data_ptr();
  rows.up = static_cast<const char*>(rows.gate) +
            width * static_cast<std::int64_t>(gate_up.element_size());
  rows.gate_stride = rows.up_stride = gate_up.size(1);
  rows.width = width;
  return rows;
}

std::int64_t grain(std::int64_t width) { return std::max<std::int64_t>(1, 8192 / (width + 1)); }

at::Tensor activation(const at::Tensor& gate_up) {
  SwigluRows rows = rows_of(gate_up);
  at::Tensor y = at::empty({gate_up.size(0), gate_up.size(1) / 2}, gate_up.options());
  rows.y = y.mutable_data_ptr();
  const SwigluKernels kernels = HEDDLE_CPU_SELECT(swiglu_kernels)(cpu_element(gate_up));
  at::parallel_for(
      0, gate_up.size(0), grain(rows.width),
      [&](std::int64_t begin, std::int64_t end) { kernels.forward(rows, begin, end); });
  return y;
}

at::Tensor activation_backward(const at::Tensor& gate_up, const at::Tensor& grad) {
  SwigluRows rows = rows_of(gate_up);
  at::Tensor result = at::empty(gate_up.sizes(), gate_up.options());
  rows.grad_y = grad.const_data_ptr();
  rows.grad_gate = result.mutable_data_ptr();
  rows.grad_up = static_cast<char*>(rows.grad_gate) +
                 rows.width * static_cast<std::int64_t>(gate_up.element_size());
  rows.grad_gate_stride = rows.grad_up_stride = gate_up.size(1);
  const SwigluKernels kernels = HEDDLE_CPU_SELECT(swiglu_kernels)(cpu_element(gate_up));
  at::parallel_for(
      0, gate_up.size(0), grain(rows.width),
      [&](std::int64_t begin, std::int64_t end) { kernels.backward(rows, begin, end); });
  return result;
}

/// y[t] = sum over j of weights[t,j] * rows[place[t,j]]; weights undefined: 1.
at::Tensor combine(const at::Tensor& rows, const at::Tensor& weights, const at::Tensor& place,
                   std::int64_t k) {
  const std::int64_t tokens = place.size(0) / k;
  at::Tensor y = at::empty({tokens, rows.size(1)}, rows.options());
  CombineRows a;
  a.rows = rows.const_data_ptr();
  a.weights = weights.defined() ? weights.const_data_ptr() : nullptr;
  a.place = place.const_data_ptr<std::int64_t>();
  a.out = y.mutable_data_ptr();
  a.count = rows.size(0);
  a.k = k;
  a.width = rows.size(1);
  const CombineKernels kernels = HEDDLE_CPU_SELECT(combine_kernels)(cpu_element(rows));
  at::parallel_for(0, tokens, grain(a.width * k),
                   [&](std::int64_t begin, std::int64_t end) { kernels.gather(a, begin, end); });
  return y;
}

}  // namespace

at::Tensor sum(const at::Tensor& rows, const at::Tensor& place, std::int64_t k) {
  return combine(rows, {}, place, k);
}

MoeExperts::Forward forward(const MoeExperts::Inputs& in, bool keep) {
  const MoeOrder order = moe_order(in.experts, in.gate_up.size(0), in.assignments);
  const std::vector<Expert> experts = non_empty(order);
  const std::int64_t n = order.source.size(0);
  const at::Tensor weights = in.weights.to(in.x.scalar_type()).contiguous();
  const at::Tensor w1 = detached(in.gate_up), w2 = detached(in.down);
  const at::Tensor rows = at::index_select(in.x, 0, order.token);
  at::Tensor gate_up = at::empty({n, w1.size(1)}, in.x.options());
  const ChangedExperts changed(order, in.changes);
  const Tensors low_1 = changed.lows(&ExpertChanges::gate_up),
                low_2 = changed.lows(&ExpertChanges::down);
  changed.send_lows(in.x, low_1);
  for_each_expert(experts, n, [&](const Expert& e) {
    at::Tensor out = part(gate_up, e);
    at::mm_out(out, part(rows, e), w1.select(0, e.index).t());
    changed.add(&ExpertChanges::gate_up, e.index, rows, low_1, gate_up);
  });
  const at::Tensor hidden = activation(gate_up);
  at::Tensor out = at::empty({n, in.x.size(1)}, in.x.options());
  for_each_expert(experts, n, [&](const Expert& e) {
    at::Tensor expert_out = part(out, e);
    at::mm_out(expert_out, part(hidden, e), w2.select(0, e.index).t());
    changed.add(&ExpertChanges::down, e.index, hidden, low_2, out);
  });
  MoeExperts::Forward result;
  result.y = combine(out, weights, order.place, order.top_k);
  changed.sum_lows(low_2, weights, result.y);
  if (!keep) return result;
  result.saved = {gate_up, out};
  for (const Tensors* const lows : {&low_1, &low_2})
    result.saved.insert(result.saved.end(), lows->begin(), lows->end());
  return result;
}

MoeExperts::Gradients backward(const MoeExperts::Inputs& in, const MoeExperts::Forward& saved,
                               const at::Tensor& grad_y_in, bool want_weight_gradients,
                               const at::Tensor& grad_branch) {
  const MoeOrder order = moe_order(in.experts, in.gate_up.size(0), in.assignments);
  const std::vector<Expert> experts = non_empty(order);
  const std::int64_t tokens = in.x.size(0), hidden_size = in.x.size(1), k = in.experts.size(1),
                     n = order.source.size(0);
  const at::Tensor grad_y = grad_y_in.contiguous();
  const at::Tensor weights = in.weights.to(in.x.scalar_type()).contiguous();
  const at::Tensor w1 = detached(in.gate_up), w2 = detached(in.down);
  const at::Tensor &gate_up = saved.saved[0], &out = saved.saved[1];
  const auto lows = saved.saved.begin() + 2, middle = lows + std::ssize(in.changes);
  const Tensors low_1(lows, middle), low_2(middle, saved.saved.end());

  MoeExperts::Gradients result;
  // d_out[p] = weight * dy[token], d_weight = dy[token] . out[p]: one pass over the sorted rows.
  at::Tensor d_out = at::empty({n, hidden_size}, in.x.options());
  at::Tensor d_weights = at::empty({tokens, k}, in.x.options());
  CombineRows a;
  a.rows = out.const_data_ptr();
  a.weights = weights.const_data_ptr();
  a.place = order.place.const_data_ptr<std::int64_t>();
  a.grad_y = grad_y.const_data_ptr();
  a.grad_rows = d_out.mutable_data_ptr();
  a.grad_weights = d_weights.mutable_data_ptr();
  a.count = n;
  a.k = k;
  a.width = hidden_size;
  const CombineKernels kernels = HEDDLE_CPU_SELECT(combine_kernels)(cpu_element(in.x));
  at::parallel_for(0, tokens, grain(hidden_size * k),
                   [&](std::int64_t begin, std::int64_t end) { kernels.scatter(a, begin, end); });

  const ChangedExperts changed(order, in.changes);
  const bool want_hidden = want_weight_gradients || changed.reads_rows(&ExpertChanges::down);
  const bool want_rows = want_weight_gradients || changed.reads_rows(&ExpertChanges::gate_up);
  const at::Tensor hidden = want_hidden ? activation(gate_up) : at::Tensor();
  const at::Tensor rows = want_rows ? at::index_select(in.x, 0, order.token) : at::Tensor();
  result.changes = changed.zeros();
  const Tensors d_low_1 = changed.lows(&ExpertChanges::gate_up),
                d_low_2 = changed.lows(&ExpertChanges::down);
  changed.sum_lows_backward(low_2, weights, grad_y, d_low_2, d_weights, result.changes);
  result.weights = d_weights.to(in.weights.scalar_type());
  at::Tensor d_hidden = at::empty({n, w2.size(2)}, in.x.options());
  for_each_expert(experts, n, [&](const Expert& e) {
    at::Tensor d = part(d_hidden, e);
    at::mm_out(d, part(d_out, e), w2.select(0, e.index));
    changed.add_backward(&ExpertChanges::down, e.index, hidden, low_2, d_out, d_hidden, d_low_2,
                         result.changes);
  });
  const at::Tensor d_gate_up = activation_backward(gate_up, d_hidden);
  at::Tensor dx = at::empty({n, hidden_size}, in.x.options());
  for_each_expert(experts, n, [&](const Expert& e) {
    at::Tensor d = part(dx, e);
    at::mm_out(d, part(d_gate_up, e), w1.select(0, e.index));
    changed.add_backward(&ExpertChanges::gate_up, e.index, rows, low_1, d_gate_up, dx, d_low_1,
                         result.changes);
  });
  result.x = sum(dx, order.place, k);
  changed.send_lows_backward(in.x, d_low_1, result.x, result.changes);
  if (grad_branch.defined()) result.x = result.x + grad_branch;
  if (!want_weight_gradients) return result;

  at::Tensor d_w1 = at::zeros(w1.sizes(), w1.options()), d_w2 = at::zeros(w2.sizes(), w2.options());
  for_each_expert(experts, n, [&](const Expert& e) {
    at::Tensor d1 = d_w1.select(0, e.index), d2 = d_w2.select(0, e.index);
    at::mm_out(d1, part(d_gate_up, e).t(), part(rows, e));
    at::mm_out(d2, part(d_out, e).t(), part(hidden, e));
  });
  result.gate_up = d_w1;
  result.down = d_w2;
  return result;
}

}  // namespace heddle::ops::moe_experts_cpu
