#include "ops/linear/cpu/vector/few_rows_kernel.h"

#include "ops/cpu_simd.h"

namespace heddle::ops::HEDDLE_CPU_ARCH {
namespace {

using namespace simd::HEDDLE_CPU_ARCH;

constexpr long kStreams = 8;  ///< Rows of the weight read at a time: enough loads in flight.
constexpr long kPrefetchBytes = 1024;
constexpr long kLane = kLanes<float>;

/// Dot products of kX rows of x with kW rows of the weight.
template <class T, int kX, int kW>
void dot_tile(const FewRows& a, long row, long column) {
  const T* const x = static_cast<const T*>(a.x) + row * a.x_stride;
  const T* const w = static_cast<const T*>(a.weight) + column * a.weight_stride;
  Vec<float> sums[kX][kW] = {};
  long k = 0;
  for (; k + kLane <= a.depth; k += kLane) {
    Vec<float> weights[kW];
#pragma GCC unroll 8
    for (int j = 0; j < kW; ++j) {
      const T* const p = w + j * a.weight_stride + k;
      __builtin_prefetch(reinterpret_cast<const char*>(p) + kPrefetchBytes);
      weights[j] = load(p);
    }
#pragma GCC unroll 8
    for (int i = 0; i < kX; ++i) {
      const Vec<float> values = load(x + i * a.x_stride + k);
#pragma GCC unroll 8
      for (int j = 0; j < kW; ++j) sums[i][j] += values * weights[j];
    }
  }
  for (int i = 0; i < kX; ++i) {
    for (int j = 0; j < kW; ++j) {
      float total = sum<float>(sums[i][j]);
      for (long rest = k; rest < a.depth; ++rest) {
        total += scalar(x[i * a.x_stride + rest]) * scalar(w[j * a.weight_stride + rest]);
      }
      assign(static_cast<T*>(a.y) + (row + i) * a.columns + column + j, total);
    }
  }
}

template <class T, int kW>
void dot_columns(const FewRows& a, long column) {
  long row = 0;
  if constexpr (kW <= 4) {
    for (; row + 4 <= a.rows; row += 4) dot_tile<T, 4, kW>(a, row, column);
  }
  for (; row + 2 <= a.rows; row += 2) dot_tile<T, 2, kW>(a, row, column);
  if (row < a.rows) dot_tile<T, 1, kW>(a, row, column);
}

template <class T>
void multiply_dots(const FewRows& a, long begin, long end) {
  long column = begin;
  // Registers hold kX times kW sums: many weight rows for few rows of x, fewer for several.
  if (a.rows == 1) {
    for (; column + kStreams <= end; column += kStreams) dot_columns<T, kStreams>(a, column);
  }
  constexpr int kW = kVectorRegisters >= 32 ? 4 : 2;
  for (; column + kW <= end; column += kW) dot_columns<T, kW>(a, column);
  for (; column < end; ++column) dot_columns<T, 1>(a, column);
}

/// kPackedRows results of kW columns: a vector over the rows of x times one weight.
template <int kW>
void packed_tile(const FewRows& a, const float* lanes, long first_row, long column) {
  constexpr int kVectors = kPackedRows / kLane;
  const float* const w = static_cast<const float*>(a.weight) + column * a.weight_stride;
  Vec<float> sums[kW][kVectors] = {};
  const auto add = [&](long k) __attribute__((always_inline)) {
    Vec<float> values[kVectors];
#pragma GCC unroll 4
    for (int v = 0; v < kVectors; ++v) values[v] = load(lanes + k * kPackedRows + v * kLane);
#pragma GCC unroll 8
    for (int j = 0; j < kW; ++j) {
      const float weight = w[j * a.weight_stride + k];
#pragma GCC unroll 4
      for (int v = 0; v < kVectors; ++v) sums[j][v] += values[v] * weight;
    }
  };
  constexpr long kLineElements = 64 / sizeof(float);
  long k = 0;
  for (; k + kLineElements <= a.depth; k += kLineElements) {
#pragma GCC unroll 8
    for (int j = 0; j < kW; ++j) {
      // The next tile's: as far ahead as this tile takes, whatever the depth.
      __builtin_prefetch(w + (kW + j) * a.weight_stride + k);
    }
    for (long i = k; i < k + kLineElements; ++i) add(i);
  }
  for (; k < a.depth; ++k) add(k);
  const long rows = a.rows - first_row < kPackedRows ? a.rows - first_row : kPackedRows;
  for (int j = 0; j < kW; ++j) {
    float results[kPackedRows];
    for (int v = 0; v < kVectors; ++v) store(results + v * kLane, sums[j][v]);
    float* const y = static_cast<float*>(a.y) + first_row * a.columns + column + j;
    for (long i = 0; i < rows; ++i) y[i * a.columns] = results[i];
  }
}

void multiply_packed(const FewRows& a, const float* lanes, long begin, long end) {
  constexpr int kW = kVectorRegisters >= 32 ? 8 : kVectorBytes >= 32 ? 4 : 2;
  long column = begin;
  for (; column + kW <= end; column += kW) {
    for (long row = 0; row < a.rows; row += kPackedRows) {
      packed_tile<kW>(a, lanes + row * a.depth, row, column);
    }
  }
  for (; column < end; ++column) {
    for (long row = 0; row < a.rows; row += kPackedRows) {
      packed_tile<1>(a, lanes + row * a.depth, row, column);
    }
  }
}

void multiply_floats(const FewRows& a, const float* lanes, long begin, long end) {
  lanes ? multiply_packed(a, lanes, begin, end) : multiply_dots<float>(a, begin, end);
}

void multiply_bfloat16(const FewRows& a, const float*, long begin, long end) {
  multiply_dots<BFloat16>(a, begin, end);
}

void pack(const FewRows& a, float* lanes) {
  const float* const x = static_cast<const float*>(a.x);
  for (long row = 0; row < a.rows; row += kPackedRows, lanes += a.depth * kPackedRows) {
    for (long k = 0; k < a.depth; ++k) {
      for (long i = 0; i < kPackedRows; ++i) {
        lanes[k * kPackedRows + i] = row + i < a.rows ? x[(row + i) * a.x_stride + k] : 0.f;
      }
    }
  }
}

}  // namespace

FewRowsKernels few_rows_kernels(bool bfloat16) {
  if (bfloat16) return {multiply_bfloat16, nullptr, 1L << 30};
  return {multiply_floats, pack, kVectorRegisters >= 32 ? 2 : 4};
}

}  // namespace heddle::ops::HEDDLE_CPU_ARCH
