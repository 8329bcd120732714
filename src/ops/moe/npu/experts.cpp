// The experts in CANN's operators: npu_moe_token_permute and unpermute, npu_grouped_matmul, which
// has no derivative, for the products of both passes, npu_swiglu between them. Nothing comes back
// to the host.
#include <ATen/TensorOperators.h>
#include <ATen/ops/arange.h>
#include <ATen/ops/cumsum.h>
#include <ATen/ops/mm.h>
#include <fmt/format.h>

#include <optional>
#include <string>
#include <utility>
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

/// Row and place of each assignment of the tokens; those of no expert are the last and have no row.
std::vector<at::Tensor> permuted(const MoeExperts::Inputs& in, const at::Tensor& tokens) {
  return npu::call(
      "npu_moe_token_permute",
      {{"tokens", tokens}, {"indices", in.experts}, {"num_out_tokens", assignments(in)}});
}

/// The gradient of the tokens.
at::Tensor permuted_backward(const MoeExperts::Inputs& in, const at::Tensor& tokens,
                             const at::Tensor& d_rows, const at::Tensor& place) {
  return npu::call("npu_moe_token_permute_grad", {{"tokens", tokens},
                                                  {"grad_permuted_tokens", d_rows},
                                                  {"indices", in.experts},
                                                  {"sorted_indices", place}})[0];
}

/// The sum of each token's rows, weighted.
at::Tensor unpermuted(const at::Tensor& rows, const at::Tensor& place, const at::Tensor& weights) {
  return npu::call("npu_moe_token_unpermute",
                   {{"permuted_tokens", rows}, {"sorted_indices", place}, {"probs", weights}})[0];
}

/// The gradients of rows and weights.
std::vector<at::Tensor> unpermuted_backward(const at::Tensor& rows, const at::Tensor& grad,
                                            const at::Tensor& place, const at::Tensor& weights) {
  return npu::call("npu_moe_token_unpermute_grad", {{"permuted_tokens", rows},
                                                    {"grad_unpermuted_tokens", grad.contiguous()},
                                                    {"sorted_indices", place},
                                                    {"probs", weights}});
}

/// The change of all rows.
ExpertChanges change_of(const MoeExperts::Inputs& in) {
  return in.changes.empty() ? ExpertChanges() : in.changes[0];
}

/// The matrix of a factor that experts share.
at::Tensor matrix(const at::Tensor& factor) { return factor.select(0, 0); }

/// y += low up_e^T, if there is a change, where experts do not share `up`.
void add_change(const ExpertLowRank& change, const at::Tensor& low, const at::Tensor& ends,
                at::Tensor& y) {
  if (change.defined() && !change.shares_up()) y = y + product(low, transposed(change.up), ends);
}

/// x down_e^T, undefined without a change. `in.x` is what the rows of gate_up come from.
at::Tensor lows_of_gate_up(const MoeExperts::Inputs& in, const at::Tensor& rows,
                           const at::Tensor& ends) {
  const ExpertLowRank change = change_of(in).gate_up;
  if (!change.defined()) return {};
  if (!change.shares_down()) return product(rows, transposed(change.down), ends);
  return permuted(in, at::mm(in.x, matrix(change.down).t()))[0];
}

/// y [T,H] += what the lows, weighted and added up by token, make of a shared `up`.
void add_to_tokens(const MoeExperts::Inputs& in, const at::Tensor& low, const at::Tensor& place,
                   at::Tensor& y) {
  const ExpertLowRank change = change_of(in).down;
  if (change.shares_up()) y = y + at::mm(unpermuted(low, place, in.weights), matrix(change.up).t());
}

/// The backward of both ways to multiply lows by `up` of down: adds to d_weights; returns the
/// gradients of the lows and of `up`.
std::pair<at::Tensor, at::Tensor> up_of_down_backward(const MoeExperts::Inputs& in,
                                                      const MoeExperts::Forward& saved,
                                                      const at::Tensor& d_out,
                                                      const at::Tensor& grad_y,
                                                      at::Tensor& d_weights) {
  const ExpertLowRank change = change_of(in).down;
  if (!change.defined()) return {};
  const at::Tensor &place = saved.saved[2], &ends = saved.saved[3], &low = saved.saved[5];
  if (!change.shares_up())
    return {product(d_out, change.up, ends), outer_product(d_out, low, ends)};
  const auto rows = unpermuted_backward(low, at::mm(grad_y, matrix(change.up)), place, in.weights);
  d_weights = d_weights + rows[1];
  return {rows[0], at::mm(grad_y.t(), unpermuted(low, place, in.weights)).unsqueeze(0)};
}

/// y and what the backward reads again.
MoeExperts::Forward forward(const MoeExperts::Inputs& in, bool keep) {
  if (assignments(in) == 0) return moe_experts_reference::forward(in, keep);
  const auto permutation = permuted(in, in.x);
  const at::Tensor &rows = permutation[0], &place = permutation[1];
  const at::Tensor ends = ends_of(in.experts, in.gate_up.size(0));
  const ExpertChanges change = change_of(in);
  at::Tensor gate_up = product(rows, transposed(in.gate_up), ends);
  const at::Tensor low_1 = lows_of_gate_up(in, rows, ends);
  add_change(change.gate_up, low_1, ends, gate_up);
  const at::Tensor hidden = activation(gate_up);
  at::Tensor out = product(hidden, transposed(in.down), ends);
  const at::Tensor low_2 =
      change.down.defined() ? product(hidden, transposed(change.down.down), ends) : at::Tensor();
  add_change(change.down, low_2, ends, out);
  MoeExperts::Forward result;
  result.y = unpermuted(out, place, in.weights);
  add_to_tokens(in, low_2, place, result.y);
  if (keep) result.saved = {gate_up, out, place, ends, low_1, low_2};
  return result;
}

MoeExperts::Gradients backward(const MoeExperts::Inputs& in, const MoeExperts::Forward& saved,
                               const at::Tensor& grad_y, bool want_weight_gradients,
                               const at::Tensor& grad_branch) {
  if (assignments(in) == 0)
    return moe_experts_reference::backward(in, saved, grad_y, want_weight_gradients, grad_branch);
  const at::Tensor &gate_up = saved.saved[0], &out = saved.saved[1], &place = saved.saved[2],
                   &ends = saved.saved[3], &low_1 = saved.saved[4];
  const auto d_unpermuted = unpermuted_backward(out, grad_y, place, in.weights);
  const at::Tensor& d_out = d_unpermuted[0];
  MoeExperts::Gradients result;
  result.weights = d_unpermuted[1];
  const ExpertChanges change = change_of(in);
  ExpertChanges gradients;
  const bool want_hidden = want_weight_gradients || change.down.defined();
  const bool want_rows =
      want_weight_gradients || (change.gate_up.defined() && !change.gate_up.shares_down());
  const at::Tensor hidden = want_hidden ? activation(gate_up) : at::Tensor();
  const at::Tensor rows = want_rows ? permuted(in, in.x)[0] : at::Tensor();
  at::Tensor d_hidden = product(d_out, in.down, ends);
  const auto [d_low_2, d_up] = up_of_down_backward(in, saved, d_out, grad_y, result.weights);
  if (change.down.defined()) {
    d_hidden = d_hidden + product(d_low_2, change.down.down, ends);
    gradients.down = {outer_product(d_low_2, hidden, ends), d_up};
  }
  const at::Tensor d_gate_up =
      npu::call("npu_swiglu_backward", {{"grad_output", d_hidden}, {"input", gate_up}})[0];
  at::Tensor d_rows = product(d_gate_up, in.gate_up, ends), d_tokens;
  if (change.gate_up.defined()) {
    const ExpertLowRank& own = change.gate_up;
    const at::Tensor d_low = product(d_gate_up, own.up, ends);
    gradients.gate_up.up = outer_product(d_gate_up, low_1, ends);
    if (own.shares_down()) {
      const at::Tensor low = at::mm(in.x, matrix(own.down).t());
      const at::Tensor d_low_tokens = permuted_backward(in, low, d_low, place);
      gradients.gate_up.down = at::mm(d_low_tokens.t(), in.x).unsqueeze(0);
      d_tokens = at::mm(d_low_tokens, matrix(own.down));
    } else {
      gradients.gate_up.down = outer_product(d_low, rows, ends);
      d_rows = d_rows + product(d_low, own.down, ends);
    }
  }
  if (!in.changes.empty()) result.changes = {gradients};
  result.x = permuted_backward(in, in.x, d_rows, place);
  if (d_tokens.defined()) result.x = result.x + d_tokens;
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
