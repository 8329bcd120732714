// How a launch of batch_rows is cut into CTAs.
#pragma once

#include <algorithm>
#include <vector>

#include "ops/linear/cuda/batch_row_parts.cuh"

namespace heddle::ops::cuda::batch_row {

/// `columns`: of a tile.
inline int tiles_of(const std::vector<FewRowSum>& sums, int columns) {
  int tiles = 0;
  for (const FewRowSum& sum : sums) {
    const int own = columns / (sum.up != nullptr ? 2 : 1);
    tiles += (sum.columns + own - 1) / own;
  }
  return tiles;
}

inline bool is_on_8_bytes(const void* data, int64_t stride) {
  return reinterpret_cast<uintptr_t>(data) % 8 == 0 && stride % 4 == 0;
}

/// Two narrow sums become the halves of one, as a tile costs the same whatever columns it has.
/// twins: the second one's outputs.
inline std::vector<FewRowSum> paired(const std::vector<FewRowSum>& sums,
                                     Twin (&twins)[kMostFewRowSums]) {
  std::vector<FewRowSum> all;
  for (std::size_t i = 0; i < sums.size(); ++i) {
    FewRowSum one = sums[i];
    if (i + 1 < sums.size()) {
      const FewRowSum& other = sums[i + 1];
      if (one.columns <= kGroupColumns / 2 && other.columns == one.columns && one.up == nullptr &&
          other.up == nullptr && one.start == nullptr && other.start == nullptr &&
          one.scale == other.scale && one.terms[0].b_stride == other.terms[0].b_stride &&
          is_on_8_bytes(one.y, one.y_stride) == is_on_8_bytes(other.y, other.y_stride)) {
        one.up = other.terms[0].b;
        one.up_change = other.change;
        twins[all.size()] = {other.y, other.y_stride};
        ++i;
      }
    }
    all.push_back(one);
  }
  return all;
}

/// How the work of a launch is cut.
struct Cut {
  int columns;  ///< Width of a tile.
  int split;    ///< CTAs that share the depth of a tile.
  int groups() const { return (columns + kGroupColumns - 1) / kGroupColumns; }
};

/// CTAs are up to 1.5 a multiprocessor, which has room for two, of which one is for the next
/// launch's; one where tiles are so wide, or changes so large, that it has room for one, and not
/// all of them if clusters are large. Each has no less than 4 blocks of the depth. Narrow tiles
/// where wide ones are few; the widest where others are so many that some multiprocessors would get
/// two and all wait for these.
inline Cut cut_of(const std::vector<FewRowSum>& sums, bool is_changed) {
  constexpr int kWide = 3 * kGroupColumns, kUsual = 2 * kGroupColumns;
  const int all = multiprocessors(), steps = (sums[0].terms[0].depth + kDepth - 1) / kDepth;
  // The widest that share the depth on nearly all multiprocessors, each with 16 blocks or more:
  Cut cut{kWide, 1};
  const int widest = tiles_of(sums, kWide);
  while (cut.split < kMostSplit && widest * cut.split * 2 <= (cut.split > 1 ? all * 7 / 8 : all))
    cut.split *= 2;
  if (cut.split == 1 || steps < cut.split * 16 || widest * cut.split * 4 < all * 3) {
    cut = {kUsual, 1};
    if (tiles_of(sums, kUsual) > all)
      cut.columns = kWide;
    else if (tiles_of(sums, kGroupColumns) * 8 <= all * 3 &&
             std::all_of(sums.begin(), sums.end(),
                         [](const auto& sum) { return sum.up == nullptr; }))
      cut.columns = kGroupColumns;
    const int tiles = tiles_of(sums, cut.columns),
              most = cut.columns == kWide ? all
                     : !is_changed        ? all * 3 / 2
                                          : (cut.columns == kUsual ? all : all * 3 / 4);
    while (cut.split < kMostSplit && tiles * cut.split * 2 <= most && steps >= cut.split * 8)
      cut.split *= 2;
  }
  // Each multiprocessor gets as few columns as it can of wide tiles that go over all of the depth.
  constexpr int kStep = 16;
  while (cut.split == 1 && cut.columns - kStep > kUsual &&
         tiles_of(sums, cut.columns - kStep) <= all)
    cut.columns -= kStep;
  return cut;
}

}  // namespace heddle::ops::cuda::batch_row
