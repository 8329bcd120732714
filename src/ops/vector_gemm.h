#pragma once

/// A small matrix product for the cpu/vector sources: operands of a few ten kB that lie in the
/// first two caches, where a library call costs more than it brings. Same rules as vector_math.h.
namespace heddle::ops::HEDDLE_CPU_ARCH {

#if defined(__AVX512F__)
constexpr int kVectorBytes = 64, kTileRows = 6, kTileVectors = 4;  // 24 of 32 registers hold sums
#elif defined(__AVX2__)
constexpr int kVectorBytes = 32, kTileRows = 6, kTileVectors = 2;  // 12 of 16
#else
constexpr int kVectorBytes = 16, kTileRows = 6, kTileVectors = 2;
#endif

template <class C>
struct Vector {
  typedef C type __attribute__((vector_size(kVectorBytes), aligned(sizeof(C)), may_alias));
};

template <class C>
constexpr int kLanes = kVectorBytes / static_cast<int>(sizeof(C));

template <class C, int kRows, int kVectors>
static inline void gemm_tile(long depth, const C* a, long a_row, long a_depth, const C* b,
                             long b_row, C* c, long c_row, bool add) {
  using V = typename Vector<C>::type;
  V sums[kRows][kVectors];
#pragma GCC unroll 8
  for (int i = 0; i < kRows; ++i) {
#pragma GCC unroll 8
    for (int j = 0; j < kVectors; ++j) {
      sums[i][j] = add ? *reinterpret_cast<const V*>(c + i * c_row + j * kLanes<C>) : V{};
    }
  }
  for (long k = 0; k < depth; ++k) {
    V row[kVectors];
#pragma GCC unroll 8
    for (int j = 0; j < kVectors; ++j) {
      row[j] = *reinterpret_cast<const V*>(b + k * b_row + j * kLanes<C>);
    }
#pragma GCC unroll 8
    for (int i = 0; i < kRows; ++i) {
      const C x = a[i * a_row + k * a_depth];
#pragma GCC unroll 8
      for (int j = 0; j < kVectors; ++j) sums[i][j] += x * row[j];
    }
  }
#pragma GCC unroll 8
  for (int i = 0; i < kRows; ++i) {
#pragma GCC unroll 8
    for (int j = 0; j < kVectors; ++j) {
      *reinterpret_cast<V*>(c + i * c_row + j * kLanes<C>) = sums[i][j];
    }
  }
}

template <class C, int kVectors>
static inline void gemm_columns(long rows, long depth, const C* a, long a_row, long a_depth,
                                const C* b, long b_row, C* c, long c_row, bool add) {
  long i = 0;
  for (; i + kTileRows <= rows; i += kTileRows) {
    gemm_tile<C, kTileRows, kVectors>(depth, a + i * a_row, a_row, a_depth, b, b_row, c + i * c_row,
                                      c_row, add);
  }
  for (; i + 2 <= rows; i += 2) {
    gemm_tile<C, 2, kVectors>(depth, a + i * a_row, a_row, a_depth, b, b_row, c + i * c_row, c_row,
                              add);
  }
  for (; i < rows; ++i) {
    gemm_tile<C, 1, kVectors>(depth, a + i * a_row, a_row, a_depth, b, b_row, c + i * c_row, c_row,
                              add);
  }
}

/// c[rows,columns] (+)= a[rows,depth] b[depth,columns]. a is read at i * a_row + k * a_depth (so a
/// transposed operand costs nothing); b and c have unit stride over columns, which must be a
/// multiple of kLanes<C>.
template <class C>
static void gemm(long rows, long columns, long depth, const C* a, long a_row, long a_depth,
                 const C* b, long b_row, C* c, long c_row, bool add) {
  long j = 0;
  for (; j + kTileVectors * kLanes<C> <= columns; j += kTileVectors * kLanes<C>) {
    gemm_columns<C, kTileVectors>(rows, depth, a, a_row, a_depth, b + j, b_row, c + j, c_row, add);
  }
  for (; j < columns; j += kLanes<C>) {
    gemm_columns<C, 1>(rows, depth, a, a_row, a_depth, b + j, b_row, c + j, c_row, add);
  }
}

}  // namespace heddle::ops::HEDDLE_CPU_ARCH
