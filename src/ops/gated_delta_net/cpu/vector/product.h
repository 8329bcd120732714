#pragma once

#include "ops/cpu_simd.h"

/// Small matrix products on matrices that live in L1 and L2: register tiles whose first factor is
/// read by broadcasts (so it may be transposed at no cost) and whose second has the result's
/// columns in its lanes.
namespace heddle::ops::gdn_cpu::HEDDLE_CPU_ARCH {

namespace simd = ::heddle::ops::simd::HEDDLE_CPU_ARCH;
using simd::kLanes;
using simd::load;
using simd::store;
using simd::Vec;

/// The first factor, a(i, k) = data[i * stride + k] or, transposed, data[k * stride + i]: the
/// second form has the elements of a tile side by side and is the faster one.
template <class T>
struct Rows {
  const T* data;
  long stride;
  static constexpr bool kTransposed = false;
};
template <class T>
struct Columns {
  const T* data;
  long stride;
  static constexpr bool kTransposed = true;
};

template <int MR, int NV, class A, class T, class Init, class Store>
HEDDLE_INLINE void tile(long i0, long j0, long depth, const A& a, const T* b, long b_stride,
                        const Init& init, const Store& done) {
  constexpr int W = kLanes<T>;
  Vec<T> sums[MR][NV];
#pragma GCC unroll 16
  for (int i = 0; i < MR; ++i) {
#pragma GCC unroll 4
    for (int j = 0; j < NV; ++j) sums[i][j] = init(i0 + i, j0 + j * W);
  }
  const T* a_tile = A::kTransposed ? a.data + i0 : a.data + i0 * a.stride;
  const long a_row = A::kTransposed ? 1 : a.stride, a_depth = A::kTransposed ? a.stride : 1;
  const T* b_tile = b + j0;
#pragma GCC unroll 2
  for (long k = 0; k < depth; ++k) {
    Vec<T> right[NV];
#pragma GCC unroll 4
    for (int j = 0; j < NV; ++j) right[j] = load(b_tile + k * b_stride + j * W);
#pragma GCC unroll 16
    for (int i = 0; i < MR; ++i) {
      const T left = a_tile[i * a_row + k * a_depth];
#pragma GCC unroll 4
      for (int j = 0; j < NV; ++j) sums[i][j] += left * right[j];
    }
  }
#pragma GCC unroll 16
  for (int i = 0; i < MR; ++i) {
#pragma GCC unroll 4
    for (int j = 0; j < NV; ++j) done(i0 + i, j0 + j * W, sums[i][j]);
  }
}

/// For every row i < rows and vector of columns j < cols of the result (both multiples of 16):
/// done(i, j, init(i, j) + sum_k a(i, k) b[k * b_stride + j ...]).
template <class A, class T, class Init, class Store>
HEDDLE_INLINE void product(long rows, long cols, long depth, const A& a, const T* b, long b_stride,
                           const Init& init, const Store& done) {
  constexpr int W = kLanes<T>;
  constexpr bool kManyRegisters = simd::kVectorRegisters == 32;
  constexpr int kRows = kManyRegisters ? 8 : 4;
  long j = 0;
  for (; j + 2 * W <= cols; j += 2 * W) {
    for (long i = 0; i < rows; i += kRows) tile<kRows, 2>(i, j, depth, a, b, b_stride, init, done);
  }
  // A transposed factor needs one pointer, any other one for each row: sixteen would spill.
  constexpr int kSingle = A::kTransposed ? 2 * kRows : kRows;
  for (; j < cols; j += W) {
    for (long i = 0; i < rows; i += kSingle) {
      tile<kSingle, 1>(i, j, depth, a, b, b_stride, init, done);
    }
  }
}

template <class T>
struct Zero {
  HEDDLE_INLINE Vec<T> operator()(long, long) const { return Vec<T>{}; }
};

}  // namespace heddle::ops::gdn_cpu::HEDDLE_CPU_ARCH
