#pragma once

#include <cstdint>

#include <ATen/core/Tensor.h>

namespace heddle::ops {

/// How often each of 0 .. count-1 is among `numbers` (int64, any shape, no others): [count] int64.
/// at::bincount would wait for the device, to learn the largest.
at::Tensor occurrences(const at::Tensor& numbers, std::int64_t count);

}  // namespace heddle::ops
