#include <ATen/TensorOperators.h>
#include <ATen/ops/empty.h>

#include "device/upload.h"
#include "ops/moe/order.h"

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

}  // namespace

MoeOrder moe_order(const at::Tensor& experts, std::int64_t expert_count) {
  if (experts.is_meta()) return order_of_shapes(experts, expert_count);
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
