#include "ops/optimizer_step/cpu/vector/adamw_elements.h"

#include "ops/vector_math.h"

namespace heddle::ops::HEDDLE_CPU_ARCH {
namespace {

static inline float root(float x) { return __builtin_sqrtf(x); }
static inline double root(double x) { return __builtin_sqrt(x); }

template <class C, class G, bool kRound>
void adamw(const AdamwElements& a, const AdamwScalars& s, long begin, long end) {
  C* __restrict p = static_cast<C*>(a.value);
  C* __restrict m = static_cast<C*>(a.exp_avg);
  C* __restrict v = static_cast<C*>(a.exp_avg_sq);
  const G* __restrict g = static_cast<const G*>(a.gradient);
  bf16* __restrict rounded = static_cast<bf16*>(a.rounded);
  const C decay = C(s.decay), one_minus_beta1 = C(1 - s.beta1), beta2 = C(s.beta2),
          one_minus_beta2 = C(1 - s.beta2), step_size = C(s.step_size),
          inverse_root = C(1 / s.root_correction2), eps = C(s.eps),
          multiplier = C(s.gradient_multiplier);
#pragma omp simd
  for (long i = begin; i < end; ++i) {
    const C gradient = static_cast<C>(widen(g[i])) * multiplier;
    m[i] += one_minus_beta1 * (gradient - m[i]);
    v[i] = beta2 * v[i] + one_minus_beta2 * gradient * gradient;
    p[i] = p[i] * decay - step_size * m[i] / (root(v[i]) * inverse_root + eps);
    if (kRound) narrow(static_cast<float>(p[i]), rounded[i]);
  }
}

template <class T>
double square_sum(const void* elements, long begin, long end) {
  const T* __restrict x = static_cast<const T*>(elements);
  // Many sums side by side: one chain of additions would wait for each of them.
  constexpr long kSums = 64;
  double sums[kSums] = {};
  long i = begin;
  for (; i + kSums <= end; i += kSums) {
#pragma omp simd
    for (long j = 0; j < kSums; ++j) {
      const double value = widen(x[i + j]);
      sums[j] += value * value;
    }
  }
  double sum = 0;
  for (; i < end; ++i) sum += static_cast<double>(widen(x[i])) * widen(x[i]);
  for (long j = 0; j < kSums; ++j) sum += sums[j];
  return sum;
}

template <class C, bool kRound>
AdamwKernel for_gradient(int gradient_element) {
  if (gradient_element == 0) return adamw<C, float, kRound>;
  if (gradient_element == 1) return adamw<C, bf16, kRound>;
  return adamw<C, double, kRound>;
}

}  // namespace

AdamwKernel adamw_kernel(int value_element, int gradient_element) {
  if (value_element == 0) return for_gradient<float, false>(gradient_element);
  if (value_element == 1) return for_gradient<float, true>(gradient_element);  // with a master
  return for_gradient<double, false>(gradient_element);
}

SquareSumKernel square_sum_kernel(int element) {
  if (element == 0) return square_sum<float>;
  if (element == 1) return square_sum<bf16>;
  return square_sum<double>;
}

}  // namespace heddle::ops::HEDDLE_CPU_ARCH
