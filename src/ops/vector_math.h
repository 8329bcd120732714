#pragma once

/// Scalar arithmetic of the cpu/vector sources, written without branches so that the compiler turns
/// loops over it into vectors. Only for sources that heddle_cpu_variants compiles; plain C++
/// without the standard library, all of it inside HEDDLE_CPU_ARCH, so that no function of one
/// instruction set can be taken for another's by the linker.
namespace heddle::ops::HEDDLE_CPU_ARCH {

struct bf16 {
  unsigned short bits;
};

/// Statistics and sums over T are held in compute<T>.
template <class T>
struct Compute {
  using type = T;
};
template <>
struct Compute<bf16> {
  using type = float;
};
template <class T>
using compute = typename Compute<T>::type;

static inline float widen(float x) { return x; }
static inline double widen(double x) { return x; }
static inline float widen(bf16 x) {
  return __builtin_bit_cast(float, static_cast<unsigned>(x.bits) << 16);
}

static inline void narrow(float x, float& y) { y = x; }
static inline void narrow(double x, double& y) { y = x; }
/// Round to nearest even; NaN stays a quiet NaN.
static inline void narrow(float x, bf16& y) {
  const unsigned bits = __builtin_bit_cast(unsigned, x);
  const unsigned rounded = (bits + 0x7fffu + ((bits >> 16) & 1u)) >> 16;
  y.bits = static_cast<unsigned short>(x != x ? 0x7fc0u : rounded);
}

/// e^x within 1 ulp, 0 below -87.3, clamped at 88.3; NaN stays NaN. Range reduction by ln 2 in two
/// parts, Taylor polynomial on [-ln2/2, ln2/2] (remainder 5e-9), power of two by exponent bits.
static inline float exp_of(float x) {
  constexpr float kMagic = 12582912.0f;  // 1.5 * 2^23: adding it rounds to an integer
  const float low = x < -87.3f ? -87.3f : x;
  const float c = low > 88.3f ? 88.3f : low;
  const float shifted = c * 1.44269504089f + kMagic;
  const float n = shifted - kMagic;
  const float r = (c - n * 0.693359375f) + n * 2.12194440e-4f;
  float p = 1.0f / 5040;
  p = p * r + 1.0f / 720;
  p = p * r + 1.0f / 120;
  p = p * r + 1.0f / 24;
  p = p * r + 1.0f / 6;
  p = p * r + 0.5f;
  p = p * r + 1.0f;
  p = p * r + 1.0f;
  const unsigned exponent = __builtin_bit_cast(unsigned, shifted) - 0x4b400000u + 127u;
  const float scaled = p * __builtin_bit_cast(float, exponent << 23);
  return x < -87.3f ? 0.0f : scaled;
}

/// The exponential in double, degree 13, 0 below -708.
static inline double exp_of(double x) {
  constexpr double kMagic = 6755399441055744.0;  // 1.5 * 2^52
  const double low = x < -708.0 ? -708.0 : x;
  const double c = low > 709.0 ? 709.0 : low;
  const double shifted = c * 1.4426950408889634074 + kMagic;
  const double n = shifted - kMagic;
  const double r = (c - n * 6.93145751953125e-1) - n * 1.42860682030941723212e-6;
  double p = 1.0 / 6227020800.0;
  p = p * r + 1.0 / 479001600.0;
  p = p * r + 1.0 / 39916800.0;
  p = p * r + 1.0 / 3628800.0;
  p = p * r + 1.0 / 362880.0;
  p = p * r + 1.0 / 40320.0;
  p = p * r + 1.0 / 5040.0;
  p = p * r + 1.0 / 720.0;
  p = p * r + 1.0 / 120.0;
  p = p * r + 1.0 / 24.0;
  p = p * r + 1.0 / 6.0;
  p = p * r + 0.5;
  p = p * r + 1.0;
  p = p * r + 1.0;
  const unsigned long long exponent =
      __builtin_bit_cast(unsigned long long, shifted) - 0x4338000000000000ull + 1023ull;
  const double scaled = p * __builtin_bit_cast(double, exponent << 52);
  return x < -708.0 ? 0.0 : scaled;
}

template <class C>
static inline C sigmoid_of(C x) {
  return C(1) / (C(1) + exp_of(-x));
}

}  // namespace heddle::ops::HEDDLE_CPU_ARCH
