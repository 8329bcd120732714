#include "ops/cpu_simd.h"
#include "ops/gated_delta_net/cpu/norm_kernels.h"

namespace heddle::ops::gdn_cpu::HEDDLE_CPU_ARCH {
namespace {

namespace simd = ::heddle::ops::simd::HEDDLE_CPU_ARCH;
using simd::Compute;
using simd::kLanes;
using simd::load;
using simd::store;
using simd::Vec;

HEDDLE_INLINE float root(float x) { return __builtin_sqrtf(x); }
HEDDLE_INLINE double root(double x) { return __builtin_sqrt(x); }

template <class X>
void forward(const NormArgs& a, long first, long last) {
  using T = Compute<X>;
  constexpr int W = kLanes<T>;
  const T* weight = static_cast<const T*>(a.weight);
  long token = first / a.H, head = first % a.H;
  for (long row = first; row < last; ++row) {
    const X* x = static_cast<const X*>(a.x) + token * a.x_stride + head * a.V;
    const X* z = static_cast<const X*>(a.z) + token * a.z_stride + head * a.V;
    X* y = static_cast<X*>(a.y) + row * a.V;
    Vec<T> squares{};
    for (long i = 0; i < a.V; i += W) squares += load(x + i) * load(x + i);
    const T rstd = T(1) / root(simd::sum<T>(squares) / T(a.V) + T(a.eps));
    static_cast<T*>(a.rstd)[row] = rstd;
    for (long i = 0; i < a.V; i += W) {
      const Vec<T> gate = load(z + i);
      store(y + i, load(weight + i) * (rstd * load(x + i)) * (gate * simd::sigmoid<T>(gate)));
    }
    if (++head == a.H) {
      head = 0;
      ++token;
    }
  }
}

template <class X>
void backward(const NormArgs& a, long first, long last, void* dw_sums) {
  using T = Compute<X>;
  constexpr int W = kLanes<T>;
  const T* weight = static_cast<const T*>(a.weight);
  T* dw = static_cast<T*>(dw_sums);
  long token = first / a.H, head = first % a.H;
  for (long row = first; row < last; ++row) {
    const X* x = static_cast<const X*>(a.x) + token * a.x_stride + head * a.V;
    const X* z = static_cast<const X*>(a.z) + token * a.z_stride + head * a.V;
    const X* dy = static_cast<const X*>(a.dy) + row * a.V;
    X* dx = static_cast<X*>(a.dx) + row * a.V;
    X* dz = static_cast<X*>(a.dz) + row * a.V;
    const T rstd = static_cast<const T*>(a.rstd)[row];
    // The gate is computed twice: keeping its products would cost as much memory traffic.
    Vec<T> along{};
    for (long i = 0; i < a.V; i += W) {
      const Vec<T> gate = load(z + i), sigmoid = simd::sigmoid<T>(gate);
      const Vec<T> d = load(dy + i), normalized = rstd * load(x + i), w = load(weight + i);
      const Vec<T> gated = d * (gate * sigmoid);
      along += gated * w * normalized;
      store(dw + i, load(dw + i) + gated * normalized);
      store(dz + i, d * w * normalized * (sigmoid * (T(1) + gate * (T(1) - sigmoid))));
    }
    const T mean = simd::sum<T>(along) / T(a.V);
    for (long i = 0; i < a.V; i += W) {
      const Vec<T> gate = load(z + i);
      const Vec<T> dn = load(dy + i) * (gate * simd::sigmoid<T>(gate)) * load(weight + i);
      store(dx + i, rstd * (dn - mean * (rstd * load(x + i))));
    }
    if (++head == a.H) {
      head = 0;
      ++token;
    }
  }
}

}  // namespace

const NormKernels& norm_kernels() {
  static const NormKernels kernels = {
      {forward<float>, forward<simd::BFloat16>, forward<double>},
      {backward<float>, backward<simd::BFloat16>, backward<double>}};
  return kernels;
}

}  // namespace heddle::ops::gdn_cpu::HEDDLE_CPU_ARCH
