#include "ops/attention/cpu/vector/output_gate_rows.h"

#include "ops/vector_math.h"

namespace heddle::ops::HEDDLE_CPU_ARCH {
namespace {

template <class T>
void forward(const OutputGateRows& a, long begin, long end) {
  for (long row = begin * a.heads; row < end * a.heads; ++row) {
    const T* __restrict gate = static_cast<const T*>(a.gate) + row / a.heads * a.token_stride +
                               row % a.heads * a.head_stride;
    const T* __restrict x = static_cast<const T*>(a.x) + row * a.dim;
    T* __restrict y = static_cast<T*>(a.y) + row * a.dim;
#pragma omp simd
    for (long i = 0; i < a.dim; ++i) narrow(widen(x[i]) * sigmoid_of(widen(gate[i])), y[i]);
  }
}

template <class T>
void backward(const OutputGateRows& a, long begin, long end) {
  using C = compute<T>;
  for (long row = begin * a.heads; row < end * a.heads; ++row) {
    const T* __restrict gate = static_cast<const T*>(a.gate) + row / a.heads * a.token_stride +
                               row % a.heads * a.head_stride;
    const T* __restrict x = static_cast<const T*>(a.x) + row * a.dim;
    const T* __restrict dy = static_cast<const T*>(a.grad_y) + row * a.dim;
    T* __restrict dx = static_cast<T*>(a.grad_x) + row * a.dim;
    T* __restrict d_gate = static_cast<T*>(a.grad_gate) + row * a.dim;
#pragma omp simd
    for (long i = 0; i < a.dim; ++i) {
      const C s = sigmoid_of(widen(gate[i])), d = widen(dy[i]) * s;
      narrow(d, dx[i]);
      narrow(d * widen(x[i]) * (C(1) - s), d_gate[i]);
    }
  }
}

}  // namespace

OutputGateKernels output_gate_kernels(int element) {
  if (element == 0) return {forward<float>, backward<float>};
  if (element == 1) return {forward<bf16>, backward<bf16>};
  return {forward<double>, backward<double>};
}

}  // namespace heddle::ops::HEDDLE_CPU_ARCH
