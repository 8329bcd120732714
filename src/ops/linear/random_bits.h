#pragma once

#include <cstdint>
#include <functional>

#include <ATen/core/Tensor.h>

namespace heddle::ops {

/// Calls use(first row, bits [n,k] int64) for runs of n rows of draws [T]: 16 random bits for each
/// draw and feature [k], those that DropoutMask describes.
void for_each_random_bits(
    std::uint64_t key, const at::Tensor& draws, const at::Tensor& features,
    const std::function<void(std::int64_t first, const at::Tensor& bits)>& use);

}  // namespace heddle::ops
