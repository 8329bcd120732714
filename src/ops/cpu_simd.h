#pragma once

/// Vectors for cpu/vector/*.cpp, as wide as the instruction set those are compiled for. Only they
/// include this: everything is in a namespace per instruction set, so that the linker never
/// exchanges one build's functions for another's. No standard templates for the same reason.
namespace heddle::ops::simd::HEDDLE_CPU_ARCH {

#if defined(__AVX512F__)
inline constexpr int kVectorBytes = 64;
inline constexpr int kVectorRegisters = 32;
#elif defined(__AVX2__)
inline constexpr int kVectorBytes = 32;
inline constexpr int kVectorRegisters = 16;
#else
inline constexpr int kVectorBytes = 16;
inline constexpr int kVectorRegisters = 16;
#endif

using Bits16 = unsigned short;
using Bits32 = unsigned int;
using Bits64 = unsigned long long;

/// A bfloat16 in memory; arithmetic is in float.
struct BFloat16 {
  Bits16 bits;
};

template <class T>
struct Lane;
template <>
struct Lane<float> {
  using Compute = float;
  using Bits = Bits32;
  static constexpr Bits kExponentShift = 23, kExponentBias = 127;
};
template <>
struct Lane<double> {
  using Compute = double;
  using Bits = Bits64;
  static constexpr Bits kExponentShift = 52, kExponentBias = 1023;
};
template <>
struct Lane<BFloat16> {
  using Compute = float;
};
/// Type in which values of T are computed.
template <class T>
using Compute = typename Lane<T>::Compute;

template <class T>
inline constexpr int kLanes = kVectorBytes / static_cast<int>(sizeof(T));

template <class T>
struct VectorOf {
  typedef T Type __attribute__((vector_size(kVectorBytes)));
  typedef T Unaligned __attribute__((vector_size(kVectorBytes), aligned(alignof(T)), may_alias));
};
template <class T>
using Vec = typename VectorOf<T>::Type;
template <class T>
using VecBits = typename VectorOf<typename Lane<T>::Bits>::Type;

#define HEDDLE_INLINE inline __attribute__((always_inline))

template <class T>
HEDDLE_INLINE Vec<T> load(const T* p) {
  return *reinterpret_cast<const typename VectorOf<T>::Unaligned*>(p);
}
template <class T>
HEDDLE_INLINE void store(T* p, Vec<T> v) {
  *reinterpret_cast<typename VectorOf<T>::Unaligned*>(p) = v;
}

typedef Bits16 HalfBits __attribute__((vector_size(kVectorBytes / 2), aligned(2), may_alias));

HEDDLE_INLINE Vec<float> load(const BFloat16* p) {
  const HalfBits bits = *reinterpret_cast<const HalfBits*>(p);
  return (Vec<float>)(__builtin_convertvector(bits, VecBits<float>) << 16);
}
/// Rounds to nearest, ties to even; NaN stays NaN.
HEDDLE_INLINE void store(BFloat16* p, Vec<float> v) {
  const VecBits<float> bits = (VecBits<float>)v;
  const VecBits<float> rounded = (bits + 0x7fff + ((bits >> 16) & 1)) >> 16;
  const VecBits<float> result = (v == v) ? rounded : (VecBits<float>{} + 0x7fc0);
  *reinterpret_cast<HalfBits*>(p) = __builtin_convertvector(result, HalfBits);
}

HEDDLE_INLINE float scalar(float x) { return x; }
HEDDLE_INLINE double scalar(double x) { return x; }
HEDDLE_INLINE float scalar(BFloat16 x) {
  const Bits32 bits = static_cast<Bits32>(x.bits) << 16;
  float f;
  __builtin_memcpy(&f, &bits, sizeof f);
  return f;
}
HEDDLE_INLINE void assign(float* p, float x) { *p = x; }
HEDDLE_INLINE void assign(double* p, double x) { *p = x; }
HEDDLE_INLINE void assign(BFloat16* p, float x) {
  Bits32 bits;
  __builtin_memcpy(&bits, &x, sizeof x);
  p->bits = x == x ? static_cast<Bits16>((bits + 0x7fff + ((bits >> 16) & 1)) >> 16)
                   : static_cast<Bits16>(0x7fc0);
}

template <class T>
HEDDLE_INLINE Vec<T> broadcast(T x) {
  return x - Vec<T>{};
}

/// The sum of the lanes, always in the same order.
template <class T>
HEDDLE_INLINE T sum(Vec<T> v) {
  T parts[kLanes<T>];
  store(parts, v);
  for (int width = kLanes<T> / 2; width > 0; width /= 2) {
    for (int i = 0; i < width; ++i) parts[i] += parts[i + width];
  }
  return parts[0];
}

/// e^x = 2^n e^r with x = n ln 2 + r, |r| <= ln2 / 2; coefficients of e^r from r^2 on, highest
/// first: minimax in fp32 (Cephes), Taylor in fp64.
template <class T>
struct ExpTable;
template <>
struct ExpTable<float> {
  static constexpr float kCoefficients[] = {1.9875691500e-4f, 1.3981999507e-3f, 8.3334519073e-3f,
                                            4.1665795894e-2f, 1.6666665459e-1f, 5.0000001201e-1f};
  static constexpr float kLog2e = 1.44269504088896341f, kLn2High = 0.693359375f,
                         kLn2Low = -2.12194440e-4f, kMagic = 12582912.f, kLow = -87.33654f,
                         kHigh = 88.3f;
};
template <>
struct ExpTable<double> {
  static constexpr double kCoefficients[] = {
      1.0 / 6227020800, 1.0 / 479001600, 1.0 / 39916800, 1.0 / 3628800, 1.0 / 362880, 1.0 / 40320,
      1.0 / 5040,       1.0 / 720,       1.0 / 120,      1.0 / 24,      1.0 / 6,      0.5};
  static constexpr double kLog2e = 1.44269504088896340736, kLn2High = 6.93145751953125e-1,
                          kLn2Low = 1.42860682030941723212e-6, kMagic = 6755399441055744.0,
                          kLow = -708.39, kHigh = 709.0;
};

/// e^x within 2 ulp; 0 below the smallest normal result, clamped above e^88.3 (fp32), NaN for NaN.
template <class T>
HEDDLE_INLINE Vec<T> exp(Vec<T> x) {
  using Table = ExpTable<T>;
  using Bits = typename Lane<T>::Bits;
  const Vec<T> high = broadcast(Table::kHigh), low = broadcast(Table::kLow);
  Vec<T> clamped = x > high ? high : x;
  clamped = clamped < low ? low : clamped;
  // Adding 1.5 * 2^mantissa rounds to an integer, which then stands in the low bits.
  const Vec<T> shifted = clamped * Table::kLog2e + Table::kMagic;
  const Vec<T> n = shifted - Table::kMagic;
  Vec<T> r = clamped - n * Table::kLn2High;
  r = r - n * Table::kLn2Low;
  Vec<T> p = broadcast(Table::kCoefficients[0]);
  constexpr int kCount = sizeof(Table::kCoefficients) / sizeof(T);
#pragma GCC unroll 16
  for (int i = 1; i < kCount; ++i) p = p * r + Table::kCoefficients[i];
  const Vec<T> mantissa = p * (r * r) + r + T(1);
  const VecBits<T> exponent = ((VecBits<T>)shifted << static_cast<Bits>(Lane<T>::kExponentShift)) +
                              (Lane<T>::kExponentBias << Lane<T>::kExponentShift);
  const Vec<T> result = mantissa * (Vec<T>)exponent;
  return x < low ? Vec<T>{} : result;
}

template <class T>
HEDDLE_INLINE Vec<T> sigmoid(Vec<T> x) {
  return T(1) / (T(1) + exp<T>(-x));
}

/// dst [cols, rows] = src [rows, cols] transposed; rows and cols are multiples of the lanes.
template <class T>
HEDDLE_INLINE void transpose(T* dst, long dst_stride, const T* src, long src_stride, long rows,
                             long cols) {
  constexpr int W = kLanes<T>;
  VecBits<T> low, high;  // the perfect shuffle of two vectors
#pragma GCC unroll 16
  for (int i = 0; i < W; ++i) {
    low[i] = i / 2 + (i % 2) * W;
    high[i] = W / 2 + i / 2 + (i % 2) * W;
  }
  for (long r = 0; r < rows; r += W) {
    for (long c = 0; c < cols; c += W) {
      Vec<T> a[W], b[W];
#pragma GCC unroll 16
      for (int i = 0; i < W; ++i) a[i] = load(src + (r + i) * src_stride + c);
        // log2(W) shuffles of rows i and i + W/2 transpose the block.
#pragma GCC unroll 4
      for (int width = W; width > 1; width /= 2) {
#pragma GCC unroll 16
        for (int i = 0; i < W / 2; ++i) {
          b[2 * i] = __builtin_shuffle(a[i], a[i + W / 2], low);
          b[2 * i + 1] = __builtin_shuffle(a[i], a[i + W / 2], high);
        }
#pragma GCC unroll 16
        for (int i = 0; i < W; ++i) a[i] = b[i];
      }
#pragma GCC unroll 16
      for (int i = 0; i < W; ++i) store(dst + (c + i) * dst_stride + r, a[i]);
    }
  }
}

}  // namespace heddle::ops::simd::HEDDLE_CPU_ARCH
