#include <ATen/TensorOperators.h>
#include <ATen/ops/empty.h>
#include <ATen/ops/index_select.h>
#include <ATen/ops/mm.h>
#include <ATen/ops/sigmoid.h>
#include <ATen/ops/sum.h>
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
  const MoeOrder order = moe_order(in.experts, in.gate_up.size(0));
  const std::int64_t tokens = in.x.size(0), hidden = in.x.size(1), n = order.source.size(0);
  const at::Tensor rows = at::index_select(in.x, 0, order.token);
  at::Tensor gate_up = at::empty({n, in.gate_up.size(1)}, in.x.options());
  at::Tensor out = at::empty({n, hidden}, in.x.options());
  for_each_expert(order, [&](std::int64_t e, std::int64_t begin, std::int64_t count) {
    at::Tensor expert_gate_up = gate_up.narrow(0, begin, count);
    expert_gate_up.copy_(at::mm(rows.narrow(0, begin, count), in.gate_up.select(0, e).t()));
    out.narrow(0, begin, count).copy_(at::mm(activation(expert_gate_up), in.down.select(0, e).t()));
  });
  const c10::ScalarType type = compute_type(in.x);
  const at::Tensor by_token =
      at::index_select(out, 0, order.place).view({tokens, in.experts.size(1), hidden});
  MoeExperts::Forward result;
  result.y =
      at::sum(by_token.to(type) * in.weights.to(type).unsqueeze(-1), {1}).to(in.x.scalar_type());
  if (keep) result.saved = {gate_up, out};
  return result;
}

MoeExperts::Gradients backward(const MoeExperts::Inputs& in, const MoeExperts::Forward& saved,
                               const at::Tensor& grad_y, bool want_weight_gradients) {
  const MoeOrder order = moe_order(in.experts, in.gate_up.size(0));
  const std::int64_t tokens = in.x.size(0), hidden = in.x.size(1), n = order.source.size(0);
  const c10::ScalarType type = compute_type(in.x);
  const at::Tensor &gate_up = saved.saved[0], &out = saved.saved[1];
  const at::Tensor rows = at::index_select(in.x, 0, order.token);
  const at::Tensor dy = at::index_select(grad_y, 0, order.token).to(type);  // sorted
  const at::Tensor row_weight =
      at::index_select(in.weights.reshape({n}), 0, order.source).to(type).unsqueeze(1);

  MoeExperts::Gradients result;
  result.weights = at::index_select(at::sum(dy * out, {1}), 0, order.place)
                       .view({tokens, in.experts.size(1)})
                       .to(in.weights.scalar_type());
  const at::Tensor d_out = (dy * row_weight).to(in.x.scalar_type());
  at::Tensor dx = at::empty({n, hidden}, in.x.options());
  if (want_weight_gradients) {
    result.gate_up = at::zeros(in.gate_up.sizes(), in.gate_up.options());
    result.down = at::zeros(in.down.sizes(), in.down.options());
  }
  for_each_expert(order, [&](std::int64_t e, std::int64_t begin, std::int64_t count) {
    const at::Tensor expert_gate_up = gate_up.narrow(0, begin, count);
    const at::Tensor expert_d_out = d_out.narrow(0, begin, count);
    const at::Tensor d_gate_up =
        activation_backward(expert_gate_up, at::mm(expert_d_out, in.down.select(0, e)));
    dx.narrow(0, begin, count).copy_(at::mm(d_gate_up, in.gate_up.select(0, e)));
    if (!want_weight_gradients) return;
    result.down.select(0, e).copy_(at::mm(expert_d_out.t(), activation(expert_gate_up)));
    result.gate_up.select(0, e).copy_(at::mm(d_gate_up.t(), rows.narrow(0, begin, count)));
  });
  result.x =
      at::sum(
          at::index_select(dx, 0, order.place).view({tokens, in.experts.size(1), hidden}).to(type),
          {1})
          .to(in.x.scalar_type());
  return result;
}

}  // namespace heddle::ops::moe_experts_reference
