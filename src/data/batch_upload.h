#pragma once

#include <ATen/core/Tensor.h>

namespace heddle::data {

/// A copy of a host tensor on the device, for which the host does not wait where the device can
/// read pinned memory. A tensor that lies there already is returned as it is.
at::Tensor upload(const at::Tensor& host, c10::Device device);

}  // namespace heddle::data
