#pragma once

#include <cstdint>

/// SplitMix64 (Steele, Lea, Flood: "Fast Splittable Pseudorandom Number Generators"): random bits
/// from a key and an index alone. Plain C++, constexpr so that CUDA sources may call it too. On
/// tensors: ops/splitmix.h.
namespace heddle::splitmix {

constexpr std::uint64_t kStride = 0x9e3779b97f4a7c15u;
constexpr std::uint64_t kMix1 = 0xbf58476d1ce4e5b9u, kMix2 = 0x94d049bb133111ebu;
/// Odd and unrelated to kStride: multiples of it start sequences that do not meet.
constexpr std::uint64_t kSequence = 0xd1342543de82ef95u;

constexpr std::uint64_t mixed(std::uint64_t x) {
  x = (x ^ (x >> 30)) * kMix1;
  x = (x ^ (x >> 27)) * kMix2;
  return x ^ (x >> 31);
}

constexpr std::uint64_t bits(std::uint64_t key, std::uint64_t index) {
  return mixed(key + (index + 1) * kStride);
}

}  // namespace heddle::splitmix
