#include "ops/rms_norm/cpu/vector/rms_norm_rows.h"

#include "ops/vector_math.h"

namespace heddle::ops::HEDDLE_CPU_ARCH {
namespace {

template <class T>
void forward(const RmsNormRows& a, long begin, long end) {
  using C = compute<T>;
  const long width = a.width;
  const C* __restrict w = static_cast<const C*>(a.scale);
  for (long row = begin; row < end; ++row) {
    const T* __restrict x = static_cast<const T*>(a.x) + row * width;
    T* __restrict y = static_cast<T*>(a.y) + row * width;
    C squares = 0;
    if (a.residual != nullptr) {
      const T* __restrict residual = static_cast<const T*>(a.residual) + row * width;
      T* __restrict sum = static_cast<T*>(a.sum) + row * width;
#pragma omp simd reduction(+ : squares)
      for (long i = 0; i < width; ++i) {
        narrow(widen(x[i]) + widen(residual[i]), sum[i]);
        squares += widen(sum[i]) * widen(sum[i]);
      }
      x = sum;
    } else {
#pragma omp simd reduction(+ : squares)
      for (long i = 0; i < width; ++i) squares += widen(x[i]) * widen(x[i]);
    }
    const C rstd = C(1) / (sizeof(C) == 8 ? C(__builtin_sqrt(squares / width + a.eps))
                                          : C(__builtin_sqrtf(float(squares / width + C(a.eps)))));
    static_cast<C*>(a.rstd)[row] = rstd;
#pragma omp simd
    for (long i = 0; i < width; ++i) narrow(widen(x[i]) * rstd * w[i], y[i]);
  }
}

template <class T>
void backward(const RmsNormRows& a, long begin, long end) {
  using C = compute<T>;
  const long width = a.width;
  const C* __restrict w = static_cast<const C*>(a.scale);
  C* __restrict dw = static_cast<C*>(a.grad_weight);
  for (long row = begin; row < end; ++row) {
    const T* __restrict x = static_cast<const T*>(a.x) + row * width;
    const T* __restrict dy = static_cast<const T*>(a.grad_y) + row * width;
    T* __restrict dx = static_cast<T*>(a.grad_x) + row * width;
    const C rstd = static_cast<const C*>(a.rstd)[row];
    C dot = 0;
#pragma omp simd reduction(+ : dot)
    for (long i = 0; i < width; ++i) {
      const C n = widen(x[i]) * rstd, d = widen(dy[i]);
      dot += d * w[i] * n;
      dw[i] += d * n;
    }
    const C mean = dot / width;
    if (a.grad_sum != nullptr) {
      const T* __restrict ds = static_cast<const T*>(a.grad_sum) + row * width;
#pragma omp simd
      for (long i = 0; i < width; ++i) {
        narrow(rstd * (widen(dy[i]) * w[i] - widen(x[i]) * rstd * mean) + widen(ds[i]), dx[i]);
      }
    } else {
#pragma omp simd
      for (long i = 0; i < width; ++i) {
        narrow(rstd * (widen(dy[i]) * w[i] - widen(x[i]) * rstd * mean), dx[i]);
      }
    }
  }
}

}  // namespace

RmsNormKernels rms_norm_kernels(int element) {
  if (element == 0) return {forward<float>, backward<float>};
  if (element == 1) return {forward<bf16>, backward<bf16>};
  return {forward<double>, backward<double>};
}

}  // namespace heddle::ops::HEDDLE_CPU_ARCH
