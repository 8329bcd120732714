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

MoeOrder order_of_shapes(const at::Tensor& experts, std::int64_t expert_count) {
  const std::int64_t n = experts.numel();
  MoeOrder order;
  order.top_k = experts.size(1);
  for (std::int64_t e = 0; e <= expert_count; ++e) order.starts.push_back(e * n / expert_count);
  order.source = order.place = order.token = at::empty({n}, experts.options());
  return order;
}

/// Sorting as the host does would have the device wait for it.
MoeOrder order_by_device(const at::Tensor& experts, std::int64_t expert_count) {
  const DeviceMoeOrder sorted = device_moe_order(experts, expert_count);
  const at::Tensor ends = sorted.ends.to(at::kCPU);
  const auto* end = ends.const_data_ptr<std::int32_t>();
  MoeOrder order{sorted.source, sorted.place, {}, {0}, experts.size(1)};
  order.token = at::floor_divide(sorted.source, order.top_k);
  order.starts.insert(order.starts.end(), end, end + expert_count);
  TORCH_CHECK(order.starts.back() == experts.numel(),
              "moe_experts: ", experts.numel() - order.starts.back(),
              " assignments are to experts beyond the ", expert_count, " there are");
  return order;
}

}  // namespace

DeviceMoeOrder device_moe_order(const at::Tensor& experts, std::int64_t expert_count) {
  const at::Tensor flat = experts.reshape({-1});
  // Two bytes of a key are sorted in a quarter of the passes of eight.
  const bool is_short = expert_count <= std::numeric_limits<std::int16_t>::max();
  auto [sorted, source] = at::sort(is_short ? flat.to(at::kShort) : flat, /*stable=*/true, 0,
                                   /*descending=*/false);
  DeviceMoeOrder order;
  order.source = source;
  order.place = at::empty(flat.sizes(), flat.options());
  order.place.scatter_(0, source, at::arange(flat.size(0), flat.options()));
  order.ends = at::searchsorted(sorted, at::arange(expert_count, sorted.options()),
                                /*out_int32=*/true, /*right=*/true);
  return order;
}

MoeOrder moe_order(const at::Tensor& experts, std::int64_t expert_count) {
  if (experts.is_meta()) return order_of_shapes(experts, expert_count);
  if (experts.is_cuda()) return order_by_device(experts, expert_count);
  const std::int64_t k = experts.size(1), n = experts.numel();
  const at::Tensor host = experts.to(at::kCPU).contiguous();
  const std::int64_t* expert = host.const_data_ptr<std::int64_t>();
  MoeOrder order;
  order.top_k = k;
  order.starts.assign(static_cast<std::size_t>(expert_count) + 1, 0);
  for (std::int64_t i = 0; i < n; ++i) {
    TORCH_CHECK(expert[i] >= 0 && expert[i] < expert_count, "moe_experts: expert ", expert[i],
                " of token ", i / k, " is not in [0, ", expert_count, ")");
    ++order.starts[static_cast<std::size_t>(expert[i]) + 1];
  }
  for (std::size_t e = 1; e < order.starts.size(); ++e) order.starts[e] += order.starts[e - 1];
  std::vector<std::int64_t> next(order.starts.begin(), order.starts.end() - 1);
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
  order.source = device_lists.select(0, 0);
  order.place = device_lists.select(0, 1);
  order.token = device_lists.select(0, 2);
  return order;
}

}  // namespace heddle::ops
