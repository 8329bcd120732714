#pragma once

#include <algorithm>
#include <cstdint>

#include <ATen/Parallel.h>
#include <ATen/core/Tensor.h>

namespace heddle::ops {

/// How many blocks sum_over_row_blocks cuts `rows` rows into.
inline std::int64_t row_block_count(std::int64_t rows) {
  // Enough blocks for many cores, few enough that their lines cost little next to the rows.
  return std::clamp<std::int64_t>(rows / 64, 1, 64);
}

/// Sums over rows in an order that does not depend on the number of threads: body(begin, end, line)
/// adds rows [begin, end) into its own line of `partial` ([row_block_count(rows),width], zeroed, of
/// dtype C); the lines are then added up in order into `result` [width].
template <class C, class Body>
void sum_over_row_blocks(std::int64_t rows, at::Tensor& partial, C* result, const Body& body) {
  const std::int64_t blocks = partial.size(0), width = partial.size(1);
  C* const lines = partial.mutable_data_ptr<C>();
  at::parallel_for(0, blocks, 1, [&](std::int64_t first, std::int64_t last) {
    for (std::int64_t b = first; b < last; ++b) {
      body(rows * b / blocks, rows * (b + 1) / blocks, lines + b * width);
    }
  });
  std::fill(result, result + width, C(0));
  for (std::int64_t b = 0; b < blocks; ++b) {
    for (std::int64_t i = 0; i < width; ++i) result[i] += lines[b * width + i];
  }
}

}  // namespace heddle::ops
