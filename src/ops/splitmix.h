#pragma once

#include <ATen/core/Tensor.h>

#include <cstdint>

#include "base/splitmix.h"

/// base/splitmix.h on int64 tensors, whose patterns stand for unsigned numbers.
namespace heddle::ops::splitmix {

inline std::int64_t number(std::uint64_t x) { return static_cast<std::int64_t>(x); }

/// x >> bits, zeros moving in.
at::Tensor shifted(const at::Tensor& x, int bits);
/// splitmix::mixed of every element, in place.
at::Tensor mixed(at::Tensor x);

}  // namespace heddle::ops::splitmix
