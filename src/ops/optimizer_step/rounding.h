#pragma once

#include <cstdint>

#include "base/splitmix.h"

/// Random bits of stochastic rounding: a function of key, step and index alone, so that every
/// device and layout rounds alike. Plain C++, constexpr so that CUDA sources may call it too.
namespace heddle::ops {

/// Bits 0-15 round the weight, 16-31 the first and 32-47 the second moment of element `index`.
constexpr std::uint64_t rounding_bits(std::uint64_t key, std::uint64_t index) {
  return heddle::splitmix::bits(key, index);
}

/// The key of a parameter in one step: every step starts elsewhere. A sum, so that a run of
/// elements may have a key of its own (see rounding_key_from).
constexpr std::uint64_t rounding_key_of_step(std::uint64_t key, std::uint64_t step) {
  return key + step * heddle::splitmix::kSequence;
}

/// The key under which element 0 has the bits that element `first` has under `key`, in every step.
constexpr std::uint64_t rounding_key_from(std::uint64_t key, std::uint64_t first) {
  return key + first * heddle::splitmix::kStride;
}

}  // namespace heddle::ops
