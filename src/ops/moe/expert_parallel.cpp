#include "ops/moe/expert_parallel.h"

#include <ATen/TensorOperators.h>
#include <ATen/ops/arange.h>
#include <ATen/ops/div.h>
#include <ATen/ops/empty.h>
#include <ATen/ops/empty_like.h>
#include <ATen/ops/eq.h>
#include <ATen/ops/remainder.h>
#include <ATen/ops/stack.h>

#include <algorithm>
#include <cmath>
#include <utility>
#include <vector>

#include "ops/autograd.h"
#include "ops/collectives.h"
#include "ops/moe/order.h"

namespace heddle::ops {
namespace {

/// Rows that travel: one for each rank that has experts for a token. Sorted by rank they are what
/// moe_order makes of assignments to ranks, where of a token's to one rank all but the first are to
/// none.
struct Dispatch {
  at::Tensor source;  ///< [at least `rows`] t * k + j at the place of each row.
  at::Tensor place;   ///< [T x k]; `rows` or more for those to none.
  std::int64_t top_k = 1;
  at::Tensor counts;  ///< [2,ranks,2] what goes to each rank and comes from it: rows, assignments.
  std::vector<std::int64_t> to, from;  ///< Rows by rank; known once the host has waited.
  std::int64_t rows = 0;               ///< To all ranks, this one too.
  std::int64_t assignments = 0;        ///< Of all ranks' tokens to experts of this one.
};

Dispatch dispatch_of_shapes(const at::Tensor& experts, std::int64_t expert_count,
                            const comm::Group& group) {
  const std::int64_t ranks = group.size(), k = experts.size(1);
  const double to_each = static_cast<double>(experts.size(0)) *
                         expected_expert_ranks(expert_count, k, ranks) / static_cast<double>(ranks);
  Dispatch dispatch;
  dispatch.top_k = k;
  // All ranks have equal shapes.
  dispatch.to.assign(static_cast<std::size_t>(ranks),
                     static_cast<std::int64_t>(std::ceil(to_each)));
  dispatch.from = dispatch.to;
  dispatch.rows = ranks * dispatch.to[0];
  dispatch.assignments = experts.numel();
  dispatch.source = at::empty({dispatch.rows}, experts.options());
  dispatch.place = at::empty({experts.numel()}, experts.options());
  return dispatch;
}

/// All that the device works out alone.
Dispatch start_dispatch(const at::Tensor& experts, std::int64_t own_experts,
                        const comm::Group& group) {
  const std::int64_t ranks = group.size(), n = experts.numel();
  if (experts.is_meta()) return dispatch_of_shapes(experts, own_experts * ranks, group);
  const at::Tensor rank = at::div(experts, own_experts, "floor");
  const at::Tensor is_repeated = at::eq(rank.unsqueeze(2), rank.unsqueeze(1)).tril(-1).any(2);
  const at::Tensor target = rank.masked_fill(is_repeated, ranks);
  const DeviceMoeOrder order = device_moe_order(target, ranks);
  Dispatch dispatch;
  dispatch.top_k = experts.size(1);
  dispatch.source =
      order.source.narrow(0, 0, std::min(n, experts.size(0) * ranks));  // No more can be rows.
  dispatch.place = order.place;

  const at::Tensor sent =
      at::eq(at::stack({target, rank}).view({2, n, 1}), at::arange(ranks, experts.options()))
          .sum(1)
          .t()
          .contiguous();
  at::Tensor received = at::empty_like(sent);
  const std::vector<std::int64_t> one_each(static_cast<std::size_t>(ranks), 1);
  group.all_to_all(received, one_each, sent, one_each);
  dispatch.counts = at::stack({sent, received});
  return dispatch;
}

/// Waits for the device, once.
void learn_counts(Dispatch& dispatch, std::int64_t expert_count) {
  if (!dispatch.counts.defined()) return;
  const at::Tensor counts = dispatch.counts.to(at::kCPU);
  const std::int64_t *sent = counts.const_data_ptr<std::int64_t>(), ranks = counts.size(1),
                     *received = sent + 2 * ranks;
  std::int64_t assigned = 0;
  for (std::int64_t r = 0; r < ranks; ++r) {
    dispatch.to.push_back(sent[2 * r]);
    dispatch.from.push_back(received[2 * r]);
    dispatch.rows += sent[2 * r];
    dispatch.assignments += received[2 * r + 1];
    assigned += sent[2 * r + 1];
  }
  TORCH_CHECK(assigned == dispatch.place.size(0),
              "moe_experts: ", dispatch.place.size(0) - assigned,
              " assignments are to experts outside of [0, ", expert_count, ")");
}

/// rows [rows,H] of x [T,H], which `gathered` begins with.
at::Tensor rows_of(const at::Tensor& x, const at::Tensor& gathered, const Dispatch& dispatch,
                   decltype(MoeExperts::Functions::sum) sum) {
  const at::Tensor rows = detached(gathered.narrow(0, 0, dispatch.rows));
  return with_gradient(
      "moe_dispatch", {x}, {rows},
      [place = dispatch.place, k = dispatch.top_k, sum](const Tensors& grads) -> Tensors {
        if (!grads[0].defined()) return {{}};
        return {sum(grads[0], place, k)};
      })[0];
}

/// y [T,H], the sums of each token's rows.
at::Tensor combined(const at::Tensor& rows, const Dispatch& dispatch,
                    const MoeExperts::Functions& functions) {
  const at::Tensor y = run_without_gradient(
      [&] { return functions.sum(detached(rows), dispatch.place, dispatch.top_k); });
  return with_gradient("moe_combine", {rows}, {y},
                       [source = dispatch.source.narrow(0, 0, dispatch.rows), k = dispatch.top_k,
                        gather = functions.gather](const Tensors& grads) -> Tensors {
                         if (!grads[0].defined()) return {{}};
                         return {gather(grads[0], source, k)};
                       })[0];
}

}  // namespace

at::Tensor moe_experts_parallel(const KernelTable& kernels, const MoeExperts::Inputs& inputs,
                                const comm::Group& group, const std::function<void()>& meanwhile) {
  const MoeExperts::Functions functions = kernels.get<MoeExperts>();
  const std::int64_t own_experts = inputs.gate_up.size(0),
                     expert_count = own_experts * group.size();
  Dispatch dispatch = start_dispatch(inputs.experts, own_experts, group);
  // Made before the host waits to learn how many they are: the device goes on meanwhile.
  const auto gathered = [&](const at::Tensor& x, auto gather) {
    return run_without_gradient(
        [&] { return gather(detached(x), dispatch.source, dispatch.top_k); });
  };
  const at::Tensor experts = gathered(inputs.experts, gather_rows),
                   weights = gathered(inputs.weights, gather_rows),
                   tokens = gathered(inputs.x, functions.gather);
  learn_counts(dispatch, expert_count);

  // A row takes all of its token's weights and experts along. The kernels of one rank, which apply
  // the weights, are those of several.
  RowExchange of_weights(rows_of(inputs.weights, weights, dispatch, sum_rows), dispatch.to,
                         dispatch.from, group);
  RowExchange of_tokens(rows_of(inputs.x, tokens, dispatch, functions.sum), dispatch.to,
                        dispatch.from, group);
  if (meanwhile) meanwhile();
  // Last, so that the device gets what takes long the sooner.
  RowExchange of_experts(experts.narrow(0, 0, dispatch.rows), dispatch.to, dispatch.from, group);
  MoeExperts::Inputs local = inputs;
  // Experts of other ranks are none here: not below own_experts, counted from the first of them.
  local.experts = at::remainder(of_experts.wait() - group.rank() * own_experts, expert_count)
                      .clamp_max(own_experts);
  local.assignments = dispatch.assignments;
  local.weights = of_weights.wait();
  local.x = of_tokens.wait();
  return combined(all_to_all_rows(moe_experts(kernels, local), dispatch.from, dispatch.to, group),
                  dispatch, functions);
}

double expected_expert_ranks(std::int64_t experts, std::int64_t top_k, std::int64_t ranks) {
  // None of the choices is among the experts of a given rank.
  double none = 1;
  for (std::int64_t i = 0; i < top_k; ++i) {
    none *= static_cast<double>(experts - experts / ranks - i) / static_cast<double>(experts - i);
  }
  return static_cast<double>(ranks) * (1 - none);
}

}  // namespace heddle::ops
