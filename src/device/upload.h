#pragma once

#include <cstdint>
#include <vector>

#include <ATen/core/Tensor.h>

namespace heddle::device {

/// A copy of a host tensor on the device, for which the host does not wait: by way of pinned
/// memory, which is kept until the copy is done (a copy from other memory waits for all that is
/// queued). A tensor that lies there already is returned as it is.
at::Tensor upload(const at::Tensor& host, c10::Device device);

/// [n] int64.
at::Tensor upload(const std::vector<std::int64_t>& values, c10::Device device);

}  // namespace heddle::device
