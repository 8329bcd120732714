#pragma once

#include <cstdint>
#include <span>
#include <vector>

#include <ATen/core/Tensor.h>

namespace heddle::objective {

/// The tokens that the distribution of each label is over, by token of a batch: what the sampler's
/// cuts left. Empty where it is over all.
using Supports = std::vector<std::vector<std::int32_t>>;

/// [n,k] int64 on the device: the supports at `places`, each with -1 to the length of the longest.
at::Tensor support_table(const Supports& supports, std::span<const std::int64_t> places,
                         c10::Device device);

}  // namespace heddle::objective
