#include "ops/moe/expert_parallel.h"

#include <ATen/ops/arange.h>
#include <ATen/ops/empty.h>
#include <ATen/ops/empty_like.h>
#include <ATen/ops/ones.h>
#include <ATen/ops/repeat_interleave.h>

#include <numeric>
#include <vector>

#include "ops/collectives.h"
#include "ops/moe/order.h"

namespace heddle::ops {
namespace {

/// How many rows each rank gets or gives: the sums of counts [ranks, experts of one], on the host.
std::vector<std::int64_t> rows_by_rank(const at::Tensor& counts) {
  const at::Tensor sums = counts.sum(1);
  const std::int64_t* sum = sums.const_data_ptr<std::int64_t>();
  return {sum, sum + sums.size(0)};
}

/// [ranks, experts of one] on the host: how many rows each rank has for the experts of this one,
/// where `sent` is what this one has for theirs.
at::Tensor exchange_counts(const at::Tensor& sent, c10::Device device, const comm::Group& group) {
  // Of shapes, all ranks have the same.
  if (device.is_meta()) return sent.narrow(0, group.rank(), 1).expand_as(sent).contiguous();
  at::Tensor received = at::empty_like(sent, sent.options().device(device));
  const std::vector<std::int64_t> one_each(static_cast<std::size_t>(group.size()), 1);
  group.all_to_all(received, one_each, sent.to(device), one_each);
  return received.to(at::kCPU);
}

}  // namespace

at::Tensor moe_experts_parallel(const KernelTable& kernels, const MoeExperts::Inputs& inputs,
                                const comm::Group& group) {
  const std::int64_t own_experts = inputs.gate_up.size(0), ranks = group.size();
  const c10::Device device = inputs.x.device();
  const MoeOrder order = moe_order(inputs.experts, own_experts * ranks);
  const at::Tensor sent = at::empty({ranks, own_experts}, at::kLong);
  std::adjacent_difference(order.starts.begin() + 1, order.starts.end(),
                           sent.mutable_data_ptr<std::int64_t>());
  const at::Tensor received = exchange_counts(sent, device, group);

  const std::vector<std::int64_t> to = rows_by_rank(sent), from = rows_by_rank(received);
  MoeExperts::Inputs local = inputs;
  local.x = all_to_all_rows(moe_permute(inputs.x, order), to, from, group);
  // From each rank come rows in the order of this rank's experts.
  local.experts =
      at::repeat_interleave(at::arange(own_experts, at::kLong).repeat({ranks}), received.view({-1}))
          .to(device)
          .unsqueeze(1);
  // Weights are applied where the token is, so that their gradient stays there.
  local.weights = at::ones(local.experts.sizes(), inputs.weights.options().requires_grad(false));
  const at::Tensor rows = all_to_all_rows(moe_experts(kernels, local), from, to, group);
  return moe_unpermute(rows, inputs.weights, order);
}

}  // namespace heddle::ops
