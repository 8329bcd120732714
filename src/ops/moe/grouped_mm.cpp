// The products of all experts in one launch each. The entry point goes through the dispatcher, so
// this compiles without CUDA; the registry offers the kernel on CUDA devices only.
#include <ATen/TensorOperators.h>
#include <ATen/ops/_grouped_mm.h>
#include <ATen/ops/arange.h>
#include <ATen/ops/constant_pad_nd.h>
#include <ATen/ops/empty.h>
#include <ATen/ops/floor_divide.h>
#include <ATen/ops/index_select.h>
#include <ATen/ops/searchsorted.h>
#include <ATen/ops/sigmoid.h>
#include <ATen/ops/sort.h>
#include <ATen/ops/sum.h>
#include <fmt/format.h>

#include <optional>
#include <string>

#include "ops/compute_type.h"
#include "ops/moe/kernels.h"

namespace heddle::ops::moe_experts_grouped_mm {
namespace {

/// moe_order on the device: nothing comes back to the host, hence indices are not checked.
struct DeviceOrder {
  at::Tensor source, place, token;  ///< As in MoeOrder.
  at::Tensor ends;                  ///< [E] int32: where each expert's rows end.
};

at::Tensor tokens_of(const at::Tensor& source, std::int64_t k) {
  return at::floor_divide(source, at::Scalar(k));
}

DeviceOrder device_order(const at::Tensor& experts, std::int64_t expert_count) {
  const at::Tensor flat = experts.reshape({-1});
  auto [sorted, source] = at::sort(flat, /*stable=*/true, 0, /*descending=*/false);
  DeviceOrder order;
  order.source = source;
  order.place = at::empty(flat.sizes(), flat.options());
  order.place.scatter_(0, source, at::arange(flat.size(0), flat.options()));
  order.token = tokens_of(source, experts.size(1));
  order.ends = at::searchsorted(sorted, at::arange(expert_count, flat.options()),
                                /*out_int32=*/true, /*right=*/true);
  return order;
}

at::Tensor activation(const at::Tensor& gate_up) {
  const std::int64_t width = gate_up.size(1) / 2;
  const at::Tensor g = gate_up.narrow(1, 0, width).to(at::kFloat);
  return (g * at::sigmoid(g) * gate_up.narrow(1, width, width)).to(gate_up.scalar_type());
}

at::Tensor activation_backward(const at::Tensor& gate_up, const at::Tensor& grad) {
  const std::int64_t width = gate_up.size(1) / 2;
  const at::Tensor g = gate_up.narrow(1, 0, width).to(at::kFloat), dy = grad.to(at::kFloat);
  const at::Tensor s = at::sigmoid(g);
  at::Tensor result = at::empty(gate_up.sizes(), gate_up.options());
  result.narrow(1, 0, width).copy_(dy * gate_up.narrow(1, width, width) * s * (1 + g * (1 - s)));
  result.narrow(1, width, width).copy_(dy * g * s);
  return result;
}

/// Factors whose rank is a multiple of 8: rows must start on 16 bytes.
ExpertLowRank padded(const ExpertLowRank& change) {
  if (!change.defined()) return change;
  const std::int64_t missing = -change.down.size(1) & 7;
  if (missing == 0) return {change.down.contiguous(), change.up.contiguous()};
  return {at::constant_pad_nd(change.down, {0, 0, 0, missing}, 0),
          at::constant_pad_nd(change.up, {0, missing}, 0)};
}

/// y += (x down_e^T) up_e^T; returns x down_e^T.
at::Tensor add_change(const ExpertLowRank& change, const at::Tensor& x, const at::Tensor& offsets,
                      at::Tensor& y) {
  if (!change.defined()) return {};
  const ExpertLowRank factors = padded(change);
  at::Tensor low = at::_grouped_mm(x, factors.down.transpose(1, 2), offsets);
  y = y + at::_grouped_mm(low, factors.up.transpose(1, 2), offsets);
  return low;
}

ExpertLowRank add_change_backward(const ExpertLowRank& change, const at::Tensor& x,
                                  const at::Tensor& low, const at::Tensor& dy,
                                  const at::Tensor& offsets, at::Tensor& dx) {
  if (!change.defined()) return {};
  const ExpertLowRank factors = padded(change);
  const at::Tensor d_low = at::_grouped_mm(dy, factors.up, offsets);
  dx = dx + at::_grouped_mm(d_low, factors.down, offsets);
  const std::int64_t rank = change.down.size(1);
  return {at::_grouped_mm(d_low.t(), x, offsets).narrow(1, 0, rank),
          at::_grouped_mm(dy.t(), low, offsets).narrow(2, 0, rank)};
}

/// The weighted sum over each token's k assignments, in fp32; weights undefined: 1.
at::Tensor combine(const at::Tensor& rows, const at::Tensor& place, const at::Tensor& experts,
                   const at::Tensor& weights) {
  at::Tensor by_token = at::index_select(rows, 0, place)
                            .view({experts.size(0), experts.size(1), rows.size(1)})
                            .to(at::kFloat);
  if (weights.defined()) by_token = by_token * weights.to(at::kFloat).unsqueeze(-1);
  return at::sum(by_token, {1}).to(rows.scalar_type());
}

std::optional<std::string> refuse(const Dims& dims) {
  for (const char* name : {"hidden_size", "intermediate_size"}) {
    const auto size = dims.find(name);
    if (size == dims.end()) return fmt::format("the request names no {}", name);
    // Rows must start on 16 bytes.
    if (size->second % 8 != 0) return fmt::format("{} {} is no multiple of 8", name, size->second);
  }
  return std::nullopt;
}

MoeExperts::Forward forward(const MoeExperts::Inputs& in, bool keep) {
  TORCH_CHECK(in.x.is_cuda(), "cuda.grouped_mm: x is on ", in.x.device());
  const DeviceOrder order = device_order(in.experts, in.gate_up.size(0));
  const at::Tensor& offsets = order.ends;
  const at::Tensor rows = at::index_select(in.x, 0, order.token);
  at::Tensor gate_up = at::_grouped_mm(rows, in.gate_up.transpose(1, 2), offsets);
  const at::Tensor low_1 = add_change(in.gate_up_change, rows, offsets, gate_up);
  const at::Tensor hidden = activation(gate_up);
  at::Tensor out = at::_grouped_mm(hidden, in.down.transpose(1, 2), offsets);
  const at::Tensor low_2 = add_change(in.down_change, hidden, offsets, out);
  MoeExperts::Forward result;
  result.y = combine(out, order.place, in.experts, in.weights);
  if (keep) result.saved = {gate_up, out, order.source, order.place, order.ends, low_1, low_2};
  return result;
}

MoeExperts::Gradients backward(const MoeExperts::Inputs& in, const MoeExperts::Forward& saved,
                               const at::Tensor& grad_y, bool want_weight_gradients) {
  const at::Tensor &gate_up = saved.saved[0], &out = saved.saved[1], &source = saved.saved[2],
                   &place = saved.saved[3], &offsets = saved.saved[4];
  const at::Tensor token = tokens_of(source, in.experts.size(1));
  const at::Tensor dy = at::index_select(grad_y, 0, token).to(at::kFloat);
  const at::Tensor row_weight =
      at::index_select(in.weights.reshape({-1}), 0, source).to(at::kFloat).unsqueeze(1);
  MoeExperts::Gradients result;
  result.weights = at::index_select(at::sum(dy * out, {1}), 0, place)
                       .view(in.weights.sizes())
                       .to(in.weights.scalar_type());
  const at::Tensor d_out = (dy * row_weight).to(in.x.scalar_type());
  const bool want_hidden = want_weight_gradients || in.down_change.defined();
  const bool want_rows = want_weight_gradients || in.gate_up_change.defined();
  const at::Tensor hidden = want_hidden ? activation(gate_up) : at::Tensor();
  const at::Tensor rows = want_rows ? at::index_select(in.x, 0, token) : at::Tensor();
  at::Tensor d_hidden = at::_grouped_mm(d_out, in.down, offsets);
  result.down_change =
      add_change_backward(in.down_change, hidden, saved.saved[6], d_out, offsets, d_hidden);
  const at::Tensor d_gate_up = activation_backward(gate_up, d_hidden);
  at::Tensor dx = at::_grouped_mm(d_gate_up, in.gate_up, offsets);
  result.gate_up_change =
      add_change_backward(in.gate_up_change, rows, saved.saved[5], d_gate_up, offsets, dx);
  result.x = combine(dx, place, in.experts, at::Tensor());
  if (want_weight_gradients) {
    result.down = at::_grouped_mm(d_out.t(), hidden, offsets);
    result.gate_up = at::_grouped_mm(d_gate_up.t(), rows, offsets);
  }
  return result;
}

}  // namespace

void add(Registry& registry) {
  registry.add<MoeExperts>({.op = "",
                            .name = "cuda.grouped_mm",
                            .device = c10::DeviceType::CUDA,
                            .dtypes = {c10::ScalarType::BFloat16},
                            .is_reference = false,
                            .refuse = refuse,
                            .on_chip_bytes = {}},
                           {forward, backward});
}

}  // namespace heddle::ops::moe_experts_grouped_mm
