#pragma once

#include "ops/grouped_low_rank/grouped_low_rank.h"

namespace heddle::ops::grouped_low_rank_cuda {

/// A change's part of the lows.
struct Low {
  void* data;
  std::int64_t stride;
};

/// Runs f(rows, change, low) for each change.
template <class F>
void each(const at::Tensor& lows, const LowRankGroups& groups, const F& f) {
  auto* const all = static_cast<char*>(lows.mutable_data_ptr());
  std::int64_t first = 0;
  for (const LowRankRows& rows : groups) {
    const std::int64_t width = rows.width();
    for (std::size_t i = 0; i < rows.changes.size(); ++i)
      f(rows, rows.changes[i], Low{all + (first + rows.column_of(i)) * lows.element_size(), width});
    first += rows.rows * width;
  }
}

}  // namespace heddle::ops::grouped_low_rank_cuda
