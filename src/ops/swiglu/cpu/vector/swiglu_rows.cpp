#include "ops/swiglu/cpu/vector/swiglu_rows.h"

#include "ops/vector_math.h"

namespace heddle::ops::HEDDLE_CPU_ARCH {
namespace {

template <class T>
void forward(const SwigluRows& a, long begin, long end) {
  using C = compute<T>;
  for (long row = begin; row < end; ++row) {
    const T* __restrict gate = static_cast<const T*>(a.gate) + row * a.gate_stride;
    const T* __restrict up = static_cast<const T*>(a.up) + row * a.up_stride;
    T* __restrict y = static_cast<T*>(a.y) + row * a.width;
#pragma omp simd
    for (long i = 0; i < a.width; ++i) {
      const C g = widen(gate[i]);
      narrow(g * sigmoid_of(g) * widen(up[i]), y[i]);
    }
  }
}

template <class T>
void backward(const SwigluRows& a, long begin, long end) {
  using C = compute<T>;
  for (long row = begin; row < end; ++row) {
    const T* __restrict gate = static_cast<const T*>(a.gate) + row * a.gate_stride;
    const T* __restrict up = static_cast<const T*>(a.up) + row * a.up_stride;
    const T* __restrict dy = static_cast<const T*>(a.grad_y) + row * a.width;
    T* __restrict d_gate = static_cast<T*>(a.grad_gate) + row * a.grad_gate_stride;
    T* __restrict d_up = static_cast<T*>(a.grad_up) + row * a.grad_up_stride;
#pragma omp simd
    for (long i = 0; i < a.width; ++i) {
      const C g = widen(gate[i]), d = widen(dy[i]);
      const C s = sigmoid_of(g);
      narrow(d * widen(up[i]) * s * (C(1) + g * (C(1) - s)), d_gate[i]);
      narrow(d * g * s, d_up[i]);
    }
  }
}

}  // namespace

SwigluKernels swiglu_kernels(int element) {
  if (element == 0) return {forward<float>, backward<float>};
  if (element == 1) return {forward<bf16>, backward<bf16>};
  return {forward<double>, backward<double>};
}

}  // namespace heddle::ops::HEDDLE_CPU_ARCH
