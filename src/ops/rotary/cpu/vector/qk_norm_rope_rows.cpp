#include "ops/rotary/cpu/vector/qk_norm_rope_rows.h"

#include "ops/vector_math.h"

namespace heddle::ops::HEDDLE_CPU_ARCH {
namespace {

template <class T>
void forward(const QkNormRopeRows& a, long begin, long end) {
  using C = compute<T>;
  const long dim = a.dim, half = a.half;
  const C* __restrict w = static_cast<const C*>(a.scale);
  for (long t = begin; t < end; ++t) {
    const C* __restrict cos = static_cast<const C*>(a.cos) + t * half;
    const C* __restrict sin = static_cast<const C*>(a.sin) + t * half;
    for (long h = 0; h < a.heads; ++h) {
      const T* __restrict x = static_cast<const T*>(a.x) + t * a.token_stride + h * a.head_stride;
      T* __restrict y = static_cast<T*>(a.y) + (t * a.heads + h) * dim;
      C squares = 0;
#pragma omp simd reduction(+ : squares)
      for (long i = 0; i < dim; ++i) squares += widen(x[i]) * widen(x[i]);
      const C rstd = C(1) / (sizeof(C) == 8 ? C(__builtin_sqrt(squares / dim + a.eps))
                                            : C(__builtin_sqrtf(float(squares / dim + C(a.eps)))));
      static_cast<C*>(a.rstd)[t * a.heads + h] = rstd;
#pragma omp simd
      for (long i = 0; i < half; ++i) {
        const C p = widen(x[i]) * rstd * w[i], q = widen(x[i + half]) * rstd * w[i + half];
        narrow(p * cos[i] - q * sin[i], y[i]);
        narrow(q * cos[i] + p * sin[i], y[i + half]);
      }
#pragma omp simd
      for (long i = 2 * half; i < dim; ++i) narrow(widen(x[i]) * rstd * w[i], y[i]);
    }
  }
}

template <class T>
void backward(const QkNormRopeRows& a, long begin, long end) {
  using C = compute<T>;
  const long dim = a.dim, half = a.half;
  const C* __restrict w = static_cast<const C*>(a.scale);
  C* __restrict dw = static_cast<C*>(a.grad_weight);
  C* __restrict turned = static_cast<C*>(a.scratch);
  for (long t = begin; t < end; ++t) {
    const C* __restrict cos = static_cast<const C*>(a.cos) + t * half;
    const C* __restrict sin = static_cast<const C*>(a.sin) + t * half;
    for (long h = 0; h < a.heads; ++h) {
      const T* __restrict x = static_cast<const T*>(a.x) + t * a.token_stride + h * a.head_stride;
      const T* __restrict dy = static_cast<const T*>(a.grad_y) + (t * a.heads + h) * dim;
      T* __restrict dx = static_cast<T*>(a.grad_x) + (t * a.heads + h) * dim;
      const C rstd = static_cast<const C*>(a.rstd)[t * a.heads + h];
#pragma omp simd
      for (long i = 0; i < half; ++i) {
        const C p = widen(dy[i]), q = widen(dy[i + half]);
        turned[i] = p * cos[i] + q * sin[i];
        turned[i + half] = q * cos[i] - p * sin[i];
      }
#pragma omp simd
      for (long i = 2 * half; i < dim; ++i) turned[i] = widen(dy[i]);
      C dot = 0;
#pragma omp simd reduction(+ : dot)
      for (long i = 0; i < dim; ++i) {
        const C n = widen(x[i]) * rstd;
        dw[i] += turned[i] * n;
        turned[i] *= w[i];
        dot += turned[i] * n;
      }
      const C mean = dot / dim;
#pragma omp simd
      for (long i = 0; i < dim; ++i) {
        narrow(rstd * (turned[i] - widen(x[i]) * rstd * mean), dx[i]);
      }
    }
  }
}

}  // namespace

QkNormRopeKernels qk_norm_rope_kernels(int element) {
  if (element == 0) return {forward<float>, backward<float>};
  if (element == 1) return {forward<bf16>, backward<bf16>};
  return {forward<double>, backward<double>};
}

}  // namespace heddle::ops::HEDDLE_CPU_ARCH
