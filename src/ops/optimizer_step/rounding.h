#pragma once

#include <cstdint>

/// Random bits of stochastic rounding: a function of key, step and index alone, so that every
/// device and layout rounds alike. Plain C++, constexpr so that CUDA sources may call it too.
namespace heddle::ops {

constexpr std::uint64_t kRoundingStride = 0x9e3779b97f4a7c15u;
constexpr std::uint64_t kRoundingMix1 = 0xbf58476d1ce4e5b9u, kRoundingMix2 = 0x94d049bb133111ebu;

/// SplitMix64 (Steele, Lea, Flood: "Fast Splittable Pseudorandom Number Generators"). Bits 0-15
/// round the weight, 16-31 the first and 32-47 the second moment of element `index`.
constexpr std::uint64_t rounding_bits(std::uint64_t key, std::uint64_t index) {
  std::uint64_t x = key + (index + 1) * kRoundingStride;
  x = (x ^ (x >> 30)) * kRoundingMix1;
  x = (x ^ (x >> 27)) * kRoundingMix2;
  return x ^ (x >> 31);
}

/// The key of a parameter in one step: multiples of one odd constant, so that every step starts
/// elsewhere. A sum, so that a run of elements may have a key of its own (see rounding_bits).
constexpr std::uint64_t rounding_key_of_step(std::uint64_t key, std::uint64_t step) {
  return key + step * 0xd1342543de82ef95u;
}

/// The key under which element 0 has the bits that element `first` has under `key`, in every step.
constexpr std::uint64_t rounding_key_from(std::uint64_t key, std::uint64_t first) {
  return key + first * kRoundingStride;
}

}  // namespace heddle::ops
