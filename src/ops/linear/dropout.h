#pragma once

#include <cstdint>

#include <ATen/core/Tensor.h>

namespace heddle::ops {

/// Which elements of a [T,k] input are dropped: a function of key, token and feature alone, so that
/// it depends on neither layout nor device.
struct DropoutMask {
  std::uint64_t key = 0;
  at::Tensor tokens, features;  ///< [T] and [k] int64, their numbers.
  double probability = 0;       ///< Of dropping an element, to 2^-32.

  std::int64_t threshold() const { return static_cast<std::int64_t>(probability * 0x1p32); }
  double kept() const { return 1 / (1 - probability); }
};

/// [T,k] of 0, where an element is dropped, and 1 / (1 - probability).
at::Tensor dropout_factors(const DropoutMask& mask, c10::ScalarType dtype);

}  // namespace heddle::ops
