#pragma once

#include <cstdint>

#include <ATen/core/Tensor.h>

namespace heddle::ops {

/// Noise of embedded tokens: [T,H], element (t, f) uniform in (-scales[t], scales[t]), in one of
/// 2^16 even steps. A function of key, draw and feature alone, as a dropout mask is, so that it
/// depends on neither layout nor device. `draws` [T] int64: ops::dropout_draws of the tokens;
/// `scales` [T] fp32.
at::Tensor embedding_noise(std::uint64_t key, const at::Tensor& draws, const at::Tensor& scales,
                           std::int64_t hidden_size, c10::ScalarType dtype);

}  // namespace heddle::ops
