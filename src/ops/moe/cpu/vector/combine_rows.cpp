#include "ops/moe/cpu/vector/combine_rows.h"

#include "ops/vector_math.h"

namespace heddle::ops::HEDDLE_CPU_ARCH {
namespace {

/// Columns summed at once, in registers or the first cache.
constexpr long kColumns = 256;

template <class T>
void gather(const CombineRows& a, long begin, long end) {
  using C = compute<T>;
  for (long t = begin; t < end; ++t) {
    T* __restrict out = static_cast<T*>(a.out) + t * a.width;
    for (long column = 0; column < a.width; column += kColumns) {
      const long width = a.width - column < kColumns ? a.width - column : kColumns;
      C sums[kColumns];
      for (long i = 0; i < width; ++i) sums[i] = 0;
      for (long j = 0; j < a.k; ++j) {
        const long place = a.place[t * a.k + j];
        if (place >= a.count) continue;
        const T* __restrict row = static_cast<const T*>(a.rows) + place * a.width + column;
        const C weight =
            a.weights != nullptr ? widen(static_cast<const T*>(a.weights)[t * a.k + j]) : C(1);
#pragma omp simd
        for (long i = 0; i < width; ++i) sums[i] += weight * widen(row[i]);
      }
      for (long i = 0; i < width; ++i) narrow(sums[i], out[column + i]);
    }
  }
}

template <class T>
void scatter(const CombineRows& a, long begin, long end) {
  using C = compute<T>;
  for (long t = begin; t < end; ++t) {
    const T* __restrict dy = static_cast<const T*>(a.grad_y) + t * a.width;
    for (long j = 0; j < a.k; ++j) {
      const long place = a.place[t * a.k + j];
      if (place >= a.count) {
        narrow(C(0), static_cast<T*>(a.grad_weights)[t * a.k + j]);
        continue;
      }
      const T* __restrict row = static_cast<const T*>(a.rows) + place * a.width;
      T* __restrict d_row = static_cast<T*>(a.grad_rows) + place * a.width;
      const C weight = widen(static_cast<const T*>(a.weights)[t * a.k + j]);
      C dot = 0;
#pragma omp simd reduction(+ : dot)
      for (long i = 0; i < a.width; ++i) {
        dot += widen(dy[i]) * widen(row[i]);
        narrow(weight * widen(dy[i]), d_row[i]);
      }
      narrow(dot, static_cast<T*>(a.grad_weights)[t * a.k + j]);
    }
  }
}

}  // namespace

CombineKernels combine_kernels(int element) {
  if (element == 0) return {gather<float>, scatter<float>};
  if (element == 1) return {gather<bf16>, scatter<bf16>};
  return {gather<double>, scatter<double>};
}

}  // namespace heddle::ops::HEDDLE_CPU_ARCH
