#include "ops/moe/expert_parallel.h"

#include <ATen/ops/arange.h>
#include <ATen/ops/empty.h>
#include <ATen/ops/empty_like.h>
#include <ATen/ops/repeat_interleave.h>

#include <numeric>
#include <vector>

#include "device/upload.h"
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

/// [ranks, experts of one] on `device`: how many rows each rank has for the experts of this one,
/// where `sent` is what this one has for theirs.
at::Tensor exchange_counts(const at::Tensor& sent, c10::Device device, const comm::Group& group) {
  // Of shapes, all ranks have the same.
  if (device.is_meta()) return sent.narrow(0, group.rank(), 1).expand_as(sent).contiguous();
  at::Tensor received = at::empty_like(sent, sent.options().device(device));
  const std::vector<std::int64_t> one_each(static_cast<std::size_t>(group.size()), 1);
  group.all_to_all(received, one_each, device::upload(sent, device), one_each);
  return received;
}

}  // namespace

at::Tensor moe_experts_parallel(const KernelTable& kernels, const MoeExperts::Inputs& inputs,
                                const comm::Group& group, const std::function<void()>& meanwhile) {
  const std::int64_t own_experts = inputs.gate_up.size(0), ranks = group.size();
  const c10::Device device = inputs.x.device();
  const MoeOrder order = moe_order(inputs.experts, own_experts * ranks);
  const at::Tensor sent = at::empty({ranks, own_experts}, at::kLong);
  std::adjacent_difference(order.starts.begin() + 1, order.starts.end(),
                           sent.mutable_data_ptr<std::int64_t>());
  const at::Tensor received = exchange_counts(sent, device, group);
  const at::Tensor received_host = device.is_meta() ? received : received.to(at::kCPU);

  const std::vector<std::int64_t> to = rows_by_rank(sent), from = rows_by_rank(received_host);
  // Weights travel too: the kernels of one rank, which apply them, are those of several.
  RowExchange weights(moe_permute_weights(inputs.weights, order), to, from, group);
  RowExchange tokens(moe_permute(inputs.x, order), to, from, group);
  if (meanwhile) meanwhile();
  MoeExperts::Inputs local = inputs;
  local.weights = weights.wait();
  local.x = tokens.wait();
  // From each rank come rows in the order of this rank's experts.
  const at::Tensor own = at::arange(own_experts, received.options());
  local.experts =
      at::repeat_interleave(own.repeat({ranks}), received.view({-1}), 0, local.x.size(0))
          .to(device)
          .unsqueeze(1);
  return moe_unpermute(all_to_all_rows(moe_experts(kernels, local), from, to, group), order);
}

}  // namespace heddle::ops
