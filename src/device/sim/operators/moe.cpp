// Routed experts: permutation and the product by groups.
#include <ATen/TensorOperators.h>
#include <ATen/core/ivalue.h>
#include <ATen/ops/arange.h>
#include <ATen/ops/argsort.h>
#include <ATen/ops/cat.h>
#include <ATen/ops/empty.h>
#include <ATen/ops/empty_like.h>
#include <ATen/ops/index_select.h>
#include <ATen/ops/mm.h>
#include <ATen/ops/stack.h>
#include <ATen/ops/zeros.h>
#include <ATen/ops/zeros_like.h>

#include <array>

#include "device/sim/driver.h"
#include "device/sim/operators/operators.h"
#include "device/sim/rules.h"

namespace heddle::device::sim {
namespace {

/// Most groups of one product, and so most experts of a rank.
constexpr std::int64_t kMostExperts = 128;

void require_bf16(const Arguments& in, const at::Tensor& x) {
  if (x.scalar_type() == at::kBFloat16 || driver().options.allow_float64) return;
  refuse(Rule::kDtype, "{} takes bfloat16, not {}", in.op(), c10::toString(x.scalar_type()));
}

/// The row of each place; zeros where the permutation kept none.
at::Tensor rows_at(const at::Tensor& rows, const at::Tensor& place) {
  const at::Tensor none = at::zeros({1, rows.size(1)}, rows.options());
  return at::index_select(at::cat({rows, none}), 0, place.clamp_max(rows.size(0)));
}

Results permute(const Arguments& in) {
  const at::Tensor tokens = in.tensor("tokens"), indices = in.tensor("indices");
  require_bf16(in, tokens);
  TORCH_CHECK(!in.flag("padded_mode"), in.op(), ": padded_mode is not supported");
  const std::int64_t top_k = indices.dim() == 2 ? indices.size(1) : 1;
  const at::Tensor flat = indices.reshape({-1});
  const at::Tensor order = at::argsort(flat, /*stable=*/true, 0, /*descending=*/false);
  at::Tensor place = at::zeros_like(order);
  place.scatter_(0, order, at::arange(order.numel(), at::kLong));
  const std::int64_t kept = in.integer("num_out_tokens");
  at::Tensor rows = at::index_select(tokens, 0, order.floor_divide(top_k));
  if (kept != 0) rows = rows.slice(0, 0, kept);
  return {rows.contiguous(), place.to(at::kInt)};
}

Results permute_backward(const Arguments& in) {
  const at::Tensor tokens = in.tensor("tokens"), grad = in.tensor("grad_permuted_tokens");
  const at::Tensor rows = rows_at(grad, in.tensor("sorted_indices")).to(wide_type(grad));
  return {rows.view({tokens.size(0), -1, tokens.size(1)}).sum(1).to(tokens.scalar_type())};
}

Results unpermute(const Arguments& in) {
  const at::Tensor permuted = in.tensor("permuted_tokens"), probs = in.tensor("probs");
  require_bf16(in, permuted);
  TORCH_CHECK(!in.flag("padded_mode"), in.op(), ": padded_mode is not supported");
  const auto type = wide_type(permuted);
  at::Tensor rows = rows_at(permuted, in.tensor("sorted_indices")).to(type);
  if (probs.defined())
    rows = (rows.view({probs.size(0), probs.size(1), -1}) * probs.to(type).unsqueeze(2)).sum(1);
  return {rows.to(permuted.scalar_type())};
}

Results unpermute_backward(const Arguments& in) {
  const at::Tensor permuted = in.tensor("permuted_tokens"), probs = in.tensor("probs"),
                   place = in.tensor("sorted_indices").to(at::kLong);
  TORCH_CHECK(probs.defined(), in.op(), ": the simulation wants probs");
  const auto type = wide_type(permuted);
  const at::Tensor g = in.tensor("grad_unpermuted_tokens").to(type).unsqueeze(1);
  const at::Tensor rows =
      rows_at(permuted, place).to(type).view({probs.size(0), probs.size(1), -1});
  const at::Tensor d_rows =
      (g * probs.to(type).unsqueeze(2)).flatten(0, 1).to(permuted.scalar_type());
  at::Tensor by_place = at::empty_like(d_rows);
  by_place.index_copy_(0, place, d_rows);
  return {by_place.slice(0, 0, permuted.size(0)).contiguous(),
          (g * rows).sum(2).to(probs.scalar_type())};
}

/// Rows of each group, from cumulative ends (0) or counts (1).
std::vector<std::int64_t> group_rows(const Arguments& in, std::int64_t rows) {
  const at::Tensor list = in.tensor("group_list");
  TORCH_CHECK(list.defined() && list.scalar_type() == at::kLong && list.dim() == 1, in.op(),
              ": group_list is int64 [groups]");
  if (list.size(0) > kMostExperts) {
    refuse(Rule::kExperts, "{}: {} groups, that is experts of this rank; the operator takes {}",
           in.op(), list.size(0), kMostExperts);
  }
  std::vector<std::int64_t> counts;
  std::int64_t before = 0;
  for (std::int64_t e = 0; e < list.size(0); ++e) {
    const std::int64_t number = list.const_data_ptr<std::int64_t>()[e];
    counts.push_back(in.integer("group_list_type") == 0 ? number - before : number);
    before = number;
  }
  std::int64_t sum = 0;
  for (const std::int64_t count : counts) {
    TORCH_CHECK(count >= 0, in.op(), ": group_list_type 0 is cumulative");
    sum += count;
  }
  TORCH_CHECK(sum <= rows, in.op(), ": the groups hold ", sum, " rows of ", rows);
  return counts;
}

Results grouped_matmul(const Arguments& in) {
  const auto xs = in.tensors("x"), weights = in.tensors("weight");
  TORCH_CHECK(xs.size() == 1 && weights.size() == 1 && in.integer("split_item") == 3, in.op(),
              ": the simulation takes one x, one weight and split_item 3");
  const at::Tensor &x = xs[0], &w = weights[0];
  TORCH_CHECK(x.scalar_type() == w.scalar_type(), in.op(), ": x of ", x.scalar_type(),
              ", weight of ", w.scalar_type());
  const auto type = wide_type(x);
  const bool splits_rows = in.integer("group_type") == 0;
  TORCH_CHECK(splits_rows ? w.dim() == 3 : in.integer("group_type") == 2 && w.dim() == 2, in.op(),
              ": weight ", w.sizes(), " in group_type ", in.integer("group_type"));
  const auto counts = group_rows(in, splits_rows ? x.size(0) : x.size(1));
  if (splits_rows) {
    TORCH_CHECK(static_cast<std::int64_t>(counts.size()) == w.size(0) && x.size(1) == w.size(1),
                in.op(), ": x ", x.sizes(), ", weight ", w.sizes(), ", ", counts.size(), " groups");
    at::Tensor y = at::zeros({x.size(0), w.size(2)}, x.options());
    std::int64_t begin = 0;
    for (std::size_t e = 0; e < counts.size(); begin += counts[e++]) {
      y.narrow(0, begin, counts[e])
          .copy_(at::mm(x.narrow(0, begin, counts[e]).to(type),
                        w[static_cast<std::int64_t>(e)].to(type)));
    }
    return {c10::List<at::Tensor>({y})};
  }
  std::vector<at::Tensor> products;
  std::int64_t begin = 0;
  for (const std::int64_t count : counts) {
    products.push_back(
        at::mm(x.narrow(1, begin, count).to(type), w.narrow(0, begin, count).to(type)));
    begin += count;
  }
  return {c10::List<at::Tensor>({at::stack(products).to(x.scalar_type())})};
}

}  // namespace

std::span<const FusedOperator> moe_operators() {
  static constexpr std::array<FusedOperator, 5> kOperators = {
      {{"npu_moe_token_permute(Tensor tokens, Tensor indices, int? num_out_tokens=None, "
        "bool padded_mode=False) -> (Tensor, Tensor)",
        permute},
       {"npu_moe_token_permute_grad(Tensor tokens, Tensor grad_permuted_tokens, "
        "Tensor indices, Tensor sorted_indices, bool padded_mode=False) -> Tensor",
        permute_backward},
       {"npu_moe_token_unpermute(Tensor permuted_tokens, Tensor sorted_indices, "
        "Tensor? probs=None, bool padded_mode=False, int[]? restore_shape=None) -> Tensor",
        unpermute},
       {"npu_moe_token_unpermute_grad(Tensor permuted_tokens, Tensor grad_unpermuted_tokens, "
        "Tensor sorted_indices, Tensor? probs=None, bool padded_mode=False, "
        "int[]? restore_shape=None) -> (Tensor, Tensor)",
        unpermute_backward},
       {"npu_grouped_matmul(Tensor[] x, Tensor[] weight, *, Tensor[]? bias=None, "
        "Tensor[]? scale=None, Tensor[]? offset=None, Tensor[]? antiquant_scale=None, "
        "Tensor[]? antiquant_offset=None, Tensor[]? per_token_scale=None, "
        "Tensor? group_list=None, Tensor[]? activation_input=None, "
        "Tensor[]? activation_quant_scale=None, Tensor[]? activation_quant_offset=None, "
        "int? split_item=0, int? group_type=None, int? group_list_type=0, int? act_type=0, "
        "int[]? tuning_config=None, int? output_dtype=None, int? x_dtype=None, "
        "int? weight_dtype=None, int? scale_dtype=None, "
        "int? per_token_scale_dtype=None) -> Tensor[]",
        grouped_matmul}}};
  return kOperators;
}

}  // namespace heddle::device::sim
