// The experts in CANN's operators: npu_moe_token_permute and unpermute, npu_grouped_matmul, which
// has no derivative, for the products of both passes, npu_swiglu between them. Nothing comes back
// to the host.
#include <ATen/TensorOperators.h>
#include <ATen/ops/arange.h>
#include <ATen/ops/cumsum.h>
#include <fmt/format.h>

#include <optional>
#include <string>
#include <vector>

#include "ops/moe/kernels.h"
#include "ops/npu/call.h"
#include "ops/npu/kernels.h"

namespace heddle::ops::moe_experts_npu {
namespace {

/// Most groups of one npu_grouped_matmul, and so most experts of a rank.
constexpr std::int64_t kMostExperts = 128;

/// Meaning of npu_grouped_matmul's groups: which rows it multiplies with which matrix.
enum class Groups : std::int64_t { kRows = 0, kInner = 2 };

at::Tensor grouped(const at::Tensor& x, const at::Tensor& weight, const at::Tensor& ends,
                   Groups groups) {
  return npu::call("npu_grouped_matmul", {{"x", std::vector<at::Tensor>{x}},
                                          {"weight", std::vector<at::Tensor>{weight}},
                                          {"group_list", ends},
                                          {"split_item", std::int64_t{3}},
                                          {"group_type", static_cast<std::int64_t>(groups)},
                                          {"group_list_type", std::int64_t{0}}})[0];
}

/// rows [N,in] of expert e times matrix e of [E,in,out]: [N,out].
at::Tensor product(const at::Tensor& rows, const at::Tensor& matrices, const at::Tensor& ends) {
  return grouped(rows, matrices, ends, Groups::kRows);
}

/// Sum over each expert's rows of a^T b: [E, columns of a, columns of b].
at::Tensor outer_product(const at::Tensor& a, const at::Tensor& b, const at::Tensor& ends) {
  return grouped(a.t(), b, ends, Groups::kInner);
}

at::Tensor transposed(const at::Tensor& matrices) { return matrices.transpose(1, 2); }

/// [E] int64: where each expert's rows end. bincount would wait for the device.
at::Tensor ends_of(const at::Tensor& experts, std::int64_t expert_count) {
  const at::Tensor numbers = at::arange(expert_count, experts.options());
  return at::cumsum((experts.reshape({-1, 1}) == numbers).sum(0), 0);
}

at::Tensor activation(const at::Tensor& gate_up) {
  return npu::call("npu_swiglu", {{"input", gate_up}})[0];
}

std::int64_t assignments(const MoeExperts::Inputs& in) {
  return in.assignments.value_or(in.experts.numel());
}

/// Row and place of each assignment; those of no expert are the last and have no row.
std::vector<at::Tensor> permuted(const MoeExperts::Inputs& in) {
  return npu::call(
      "npu_moe_token_permute",
      {{"tokens", in.x}, {"indices", in.experts}, {"num_out_tokens", assignments(in)}});
}

/// The change of all rows.
ExpertChanges change_of(const MoeExperts::Inputs& in) {
  return in.changes.empty() ? ExpertChanges() : in.changes[0];
}

/// y += (x down_e^T) up_e^T; returns x down_e^T, undefined without a change.
at::Tensor add_change(const ExpertLowRank& change, const at::Tensor& x, const at::Tensor& ends,
                      at::Tensor& y) {
  if (!change.defined()) return {};
  at::Tensor low = product(x, transposed(change.down), ends);
  y = y + product(low, transposed(change.up), ends);
  return low;
}

/// Adds to dx; returns the gradients of the change.
ExpertLowRank add_change_backward(const ExpertLowRank& change, const at::Tensor& x,
                                  const at::Tensor& low, const at::Tensor& dy,
                                  const at::Tensor& ends, at::Tensor& dx) {
  if (!change.defined()) return {};
  const at::Tensor d_low = product(dy, change.up, ends);
  dx = dx + product(d_low, change.down, ends);
  return {outer_product(d_low, x, ends), outer_product(dy, low, ends)};
}

/// y and what the backward reads again.
MoeExperts::Forward forward(const MoeExperts::Inputs& in, bool keep) {
  if (assignments(in) == 0) return moe_experts_reference::forward(in, keep);
  const auto permutation = permuted(in);
  const at::Tensor &rows = permutation[0], &place = permutation[1];
  const at::Tensor ends = ends_of(in.experts, in.gate_up.size(0));
  at::Tensor gate_up = product(rows, transposed(in.gate_up), ends);
  const at::Tensor low_1 = add_change(change_of(in).gate_up, rows, ends, gate_up);
  const at::Tensor hidden = activation(gate_up);
  at::Tensor out = product(hidden, transposed(in.down), ends);
  const at::Tensor low_2 = add_change(change_of(in).down, hidden, ends, out);
  MoeExperts::Forward result;
  result.y =
      npu::call("npu_moe_token_unpermute",
                {{"permuted_tokens", out}, {"sorted_indices", place}, {"probs", in.weights}})[0];
  if (keep) result.saved = {gate_up, out, place, ends, low_1, low_2};
  return result;
}

MoeExperts::Gradients backward(const MoeExperts::Inputs& in, const MoeExperts::Forward& saved,
                               const at::Tensor& grad_y, bool want_weight_gradients,
                               const at::Tensor& grad_branch) {
  if (assignments(in) == 0)
    return moe_experts_reference::backward(in, saved, grad_y, want_weight_gradients, grad_branch);
  const at::Tensor &gate_up = saved.saved[0], &out = saved.saved[1], &place = saved.saved[2],
                   &ends = saved.saved[3];
  const auto d_unpermuted =
      npu::call("npu_moe_token_unpermute_grad", {{"permuted_tokens", out},
                                                 {"grad_unpermuted_tokens", grad_y.contiguous()},
                                                 {"sorted_indices", place},
                                                 {"probs", in.weights}});
  const at::Tensor& d_out = d_unpermuted[0];
  MoeExperts::Gradients result;
  result.weights = d_unpermuted[1];
  const ExpertChanges change = change_of(in);
  ExpertChanges gradients;
  const bool want_hidden = want_weight_gradients || change.down.defined();
  const bool want_rows = want_weight_gradients || change.gate_up.defined();
  const at::Tensor hidden = want_hidden ? activation(gate_up) : at::Tensor();
  const at::Tensor rows = want_rows ? permuted(in)[0] : at::Tensor();
  at::Tensor d_hidden = product(d_out, in.down, ends);
  gradients.down = add_change_backward(change.down, hidden, saved.saved[5], d_out, ends, d_hidden);
  const at::Tensor d_gate_up =
      npu::call("npu_swiglu_backward", {{"grad_output", d_hidden}, {"input", gate_up}})[0];
  at::Tensor d_rows = product(d_gate_up, in.gate_up, ends);
  gradients.gate_up =
      add_change_backward(change.gate_up, rows, saved.saved[4], d_gate_up, ends, d_rows);
  if (!in.changes.empty()) result.changes = {gradients};
  result.x = npu::call("npu_moe_token_permute_grad", {{"tokens", in.x},
                                                      {"grad_permuted_tokens", d_rows},
                                                      {"indices", in.experts},
                                                      {"sorted_indices", place}})[0];
  if (grad_branch.defined()) result.x = result.x + grad_branch;
  if (want_weight_gradients) {
    result.down = outer_product(d_out, hidden, ends);
    result.gate_up = outer_product(d_gate_up, rows, ends);
  }
  return result;
}

std::optional<std::string> refuse(const MoeExperts::Dims& dims) {
  if (dims.num_experts > kMostExperts) {
    return fmt::format(
        "{} experts on a rank, npu_grouped_matmul takes {}; divide them with parallel.ep",
        dims.num_experts, kMostExperts);
  }
  if (dims.top_k > 512) return fmt::format("top_k {} is above 512", dims.top_k);
  return std::nullopt;
}

}  // namespace

}  // namespace heddle::ops::moe_experts_npu

namespace heddle::ops::npu {

void add_moe(Registry& registry) {
  using namespace moe_experts_npu;
  registry.add<MoeExperts>(KernelInfo::ascend("npu.grouped_matmul", {c10::ScalarType::BFloat16}),
                           {forward, backward}, {.refuse = refuse});
  // The permutation takes bf16 alone.
  registry.add<MoeExperts>(KernelInfo::ascend("npu.product_per_expert",
                                              {c10::ScalarType::Float, c10::ScalarType::Double}),
                           {.forward = moe_experts_reference::forward,
                            .backward = moe_experts_reference::backward,
                            .takes_sets = true},
                           {.refuse = refuse});
}

}  // namespace heddle::ops::npu
