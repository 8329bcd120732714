#pragma once

#include <cstdint>

/// Optimizer state in 8 bits, as block-wise dynamic codes ("8-bit Optimizers via Block-wise
/// Quantization", arXiv 2110.02861), with two differences: the second moment is kept as its square
/// root, which halves the range it needs, and values are rounded stochastically, so that changes
/// below a code's step are not lost. Plain C++, constexpr so that CUDA sources may call it too.
namespace heddle::ops::eight_bit {

/// Elements that share a scale, the largest magnitude among them.
inline constexpr std::int64_t kBlock = 256;
/// Bits of the magnitude; the first moment's eighth is the sign.
inline constexpr int kMomentBits = 7, kRootBits = 8;

// A code u is 2^i - 1 + k: magnitude k of 1..2^i in range i of 0..bits-1, which reaches from
// 8^(i-bits) (the lowest from 0) to 8^(i-bits+1) in 2^i equal steps. The uppermost code is 1, code
// 0 is 0. All of this is exact in fp32.

constexpr float power_of_8(int exponent) {
  float power = 1;
  for (int i = 0; i < exponent; ++i) power *= 8;
  for (int i = 0; i > exponent; --i) power *= 0.125F;
  return power;
}

/// Magnitude of a code, in [0, 1].
constexpr float decoded(int code, int bits) {
  if (code == 0) return 0;
  int range = 0;
  while ((2 << range) <= code) ++range;
  const int k = code - (1 << range) + 1;
  return power_of_8(range - bits + 1) *
         (0.125F + 0.875F * static_cast<float>(k) / static_cast<float>(1 << range));
}

/// The range in which a magnitude in [0, 1] lies.
constexpr int range_of(float x, int bits) {
  int range = 0;
  while (range + 1 < bits && x >= power_of_8(range + 1 - bits)) ++range;
  return range;
}

/// x in (0, 1] in steps of its range, from its lower end.
constexpr float steps_of(float x, int range, int bits) {
  const float of_top = x * power_of_8(bits - 1 - range);
  if (range == 0) return of_top;
  return (of_top - 0.125F) * (static_cast<float>(1 << range) / 0.875F);
}

/// The code of x in [0, 1], rounded up with the probability that makes the mean exact; `random` is
/// uniform in [0, 1). `keeps_nonzero`: what is not 0 does not become 0 (a second moment of 0 beside
/// a first that is not would divide by eps alone).
constexpr int encoded(float x, float random, int bits, bool keeps_nonzero) {
  const int range = range_of(x, bits), most = 1 << range;
  int k = static_cast<int>(steps_of(x, range, bits) + random);
  if (k > most) k = most;
  if (range == 0 && keeps_nonzero && x > 0) k = 1;
  return most - 1 + k;
}

}  // namespace heddle::ops::eight_bit
