#pragma once

#include <cstdint>

/// Probabilities as whole numbers, so that their sums do not depend on the order and a CPU and a
/// GPU draw the same token. Plain C++, constexpr so that CUDA sources may call it too; to be
/// compiled without fused multiply-add.
namespace heddle::ops::sampling {

/// The mass of the most likely token. Tokens below 2^-44 of it have none and are never drawn; sums
/// over 2^19 tokens fit 64 bits.
constexpr int kMassBits = 44;

/// 1 / temperature in units of log 2.
constexpr float log2_rate(float temperature) { return 1.4426950408889634f / temperature; }

/// exp((logit - highest) / temperature) * 2^44, rounded down; relative error about 2e-6. Monotone
/// in the logit, 0 for NaN.
constexpr std::uint64_t mass_of(float logit, float highest, float rate) {
  const float x = (logit - highest) * rate;
  if (!(x > -static_cast<float>(kMassBits + 1))) return 0;
  int whole = static_cast<int>(x);
  if (static_cast<float>(whole) > x) --whole;
  const float f = x - static_cast<float>(whole);
  // 2^f on [0, 1): a polynomial of least largest error, 1 at 0.
  float p = 1.8775767e-3f;
  p = p * f + 8.9893397e-3f;
  p = p * f + 5.5826318e-2f;
  p = p * f + 2.4015361e-1f;
  p = p * f + 6.9315308e-1f;
  p = p * f + 1.0f;
  const auto mantissa = static_cast<std::uint64_t>(p * 8388608.0f);  // 2^23
  const int shift = kMassBits - 23 + whole;
  return shift >= 0 ? mantissa << shift : mantissa >> -shift;
}

/// Orders floats as unsigned numbers; -0 and 0 are one, NaN is the least.
constexpr std::uint32_t rank_of(std::uint32_t bits) {
  if ((bits & 0x7fffffffu) > 0x7f800000u) return 0;
  if (bits == 0x80000000u) bits = 0;
  return bits & 0x80000000u ? ~bits : bits | 0x80000000u;
}

/// A share as a part of `total`, at least 1.
constexpr std::uint64_t part_of(std::uint64_t total, double share) {
  const auto part = static_cast<std::uint64_t>(static_cast<double>(total) * share);
  return part < 1 ? 1 : part > total ? total : part;
}

/// The place that a uniform number has in a total above 0.
constexpr std::uint64_t place_of(std::uint64_t total, double uniform) {
  const auto place = static_cast<std::uint64_t>(static_cast<double>(total) * uniform);
  return place < total ? place : total - 1;
}

}  // namespace heddle::ops::sampling
