#include "device/upload.h"

#include <ATen/ops/empty.h>

#include <algorithm>

namespace heddle::device {

at::Tensor upload(const at::Tensor& host, c10::Device device) {
  // The meta device has nothing to copy to.
  const bool is_copied = host.is_cpu() && !device.is_cpu() && !device.is_meta();
  return is_copied ? host.pin_memory().to(device, /*non_blocking=*/true) : host.to(device);
}

at::Tensor upload(const std::vector<std::int64_t>& values, c10::Device device) {
  const at::Tensor host = at::empty({static_cast<std::int64_t>(values.size())}, at::kLong);
  std::copy(values.begin(), values.end(), host.mutable_data_ptr<std::int64_t>());
  return upload(host, device);
}

}  // namespace heddle::device
