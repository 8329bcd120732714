#include "ops/moe/order.h"

#include <ATen/TensorOperators.h>
#include <ATen/ops/arange.h>
#include <ATen/ops/empty.h>
#include <ATen/ops/floor_divide.h>
#include <ATen/ops/searchsorted.h>
#include <ATen/ops/sort.h>

#include <limits>

#include "device/upload.h"

namespace heddle::ops {

namespace {

MoeOrder order_of_shapes(const at::Tensor& experts, std::int64_t expert_count,
                         std::int64_t assignments) {
  MoeOrder order;
  order.top_k = experts.size(1);
  for (std::int64_t e = 0; e <= expert_count; ++e)
    order.starts.push_back(e * assignments / expert_count);
  order.source = order.token = at::empty({assignments}, experts.options());
  order.place = at::empty({experts.numel()}, experts.options());
  return order;
}

struct Sorted {
  at::Tensor keys, source, place;

  /// [last - first] int32: where the keys first .. last - 1 end.
  at::Tensor ends(std::int64_t first, std::int64_t last) const {
    return at::searchsorted(keys, at::arange(first, last, keys.options()), /*out_int32=*/true,
                            /*right=*/true);
  }
};

/// Keys of at most expert_count + 1.
Sorted sorted_by_expert(const at::Tensor& experts, std::int64_t expert_count) {
  const at::Tensor flat = experts.reshape({-1});
  // Two bytes of a key are sorted in a quarter of the passes of eight.
  const bool is_short = expert_count < std::numeric_limits<std::int16_t>::max();
  auto [keys, source] = at::sort(is_short ? flat.to(at::kShort) : flat, /*stable=*/true, 0,
                                 /*descending=*/false);
  at::Tensor place = at::empty(flat.sizes(), flat.options());
  place.scatter_(0, source, at::arange(flat.size(0), flat.options()));
  return {keys, source, place};
}

/// Sorting as the host does would have the device wait for it.
MoeOrder order_by_device(const at::Tensor& experts, std::int64_t expert_count,
                         std::int64_t assignments) {
  // A value beyond the bounds would wrap when it is sorted as two bytes.
  const Sorted sorted = sorted_by_expert(experts.clamp(-1, expert_count + 1), expert_count);
  const at::Tensor ends = sorted.ends(-1, expert_count + 1).to(at::kCPU);
  const auto* end = ends.const_data_ptr<std::int32_t>();
  const std::int64_t found = end[expert_count] - end[0];
  TORCH_CHECK(end[0] == 0 && end[expert_count + 1] == experts.numel() && found == assignments,
              "moe_experts: of ", experts.numel(), " assignments ", found, " are to one of ",
              expert_count, " experts, expected ", assignments, "; ", end[0], " are negative, ",
              experts.numel() - end[expert_count + 1], " above ", expert_count);
  MoeOrder order;
  order.source = sorted.source.narrow(0, 0, assignments);
  order.place = sorted.place;
  order.top_k = experts.size(1);
  order.token = at::floor_divide(order.source, order.top_k);
  order.starts.assign(end, end + expert_count + 1);
  return order;
}

}  // namespace

DeviceMoeOrder device_moe_order(const at::Tensor& experts, std::int64_t expert_count) {
  const Sorted sorted = sorted_by_expert(experts, expert_count);
  return {sorted.source, sorted.place, sorted.ends(0, expert_count)};
}

MoeOrder moe_order(const at::Tensor& experts, std::int64_t expert_count,
                   std::optional<std::int64_t> assignments) {
  const std::int64_t wanted = assignments.value_or(experts.numel());
  if (experts.is_meta()) return order_of_shapes(experts, expert_count, wanted);
  if (experts.is_cuda()) return order_by_device(experts, expert_count, wanted);
  const std::int64_t k = experts.size(1), n = experts.numel();
  const at::Tensor host = experts.to(at::kCPU).contiguous();
  const std::int64_t* expert = host.const_data_ptr<std::int64_t>();
  MoeOrder order;
  order.top_k = k;
  order.starts.assign(static_cast<std::size_t>(expert_count) + 1, 0);
  for (std::int64_t i = 0; i < n; ++i) {
    // One more: none.
    const std::int64_t last = assignments ? expert_count : expert_count - 1;
    TORCH_CHECK(expert[i] >= 0 && expert[i] <= last, "moe_experts: expert ", expert[i],
                " of token ", i / k, " is not in [0, ", last, "]");
    if (expert[i] < expert_count) ++order.starts[static_cast<std::size_t>(expert[i]) + 1];
  }
  for (std::size_t e = 1; e < order.starts.size(); ++e) order.starts[e] += order.starts[e - 1];
  TORCH_CHECK(order.starts.back() == wanted, "moe_experts: ", order.starts.back(),
              " assignments to experts, expected ", wanted);
  std::vector<std::int64_t> next = order.starts;
  // One tensor for the three lists: one copy to the device.
  const at::Tensor lists = at::empty({3, n}, at::kLong);
  std::int64_t* source = lists.mutable_data_ptr<std::int64_t>();
  std::int64_t *place = source + n, *token = place + n;
  for (std::int64_t i = 0; i < n; ++i) {
    const std::int64_t p = next[static_cast<std::size_t>(expert[i])]++;
    source[p] = i;
    place[i] = p;
    token[p] = i / k;
  }
  const at::Tensor device_lists = device::upload(lists, experts.device());
  order.source = device_lists.select(0, 0).narrow(0, 0, wanted);
  order.place = device_lists.select(0, 1);
  order.token = device_lists.select(0, 2).narrow(0, 0, wanted);
  return order;
}

}  // namespace heddle::ops
