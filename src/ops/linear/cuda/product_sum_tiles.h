// Tiles of sums of products: plain C++, no ATen.
#pragma once

#include <algorithm>
#include <cstdint>
#include <vector>

#include "ops/cuda/element.h"
#include "ops/linear/cuda/product_sum.h"

namespace heddle::ops::cuda {

constexpr int kRows = 128;  ///< Rows of each CTA of a pair.
constexpr int kColumns = 256, kNarrowColumns = 64, kWidest = kColumns / 64;

/// Blocks of a tile of the wide sums: those with which the cluster that has most to do is through
/// first. Beside products, which are fewer in narrow tiles, a step waits for what L2 gives to all
/// multiprocessors at once, which is more for all of them together.
inline int blocks_of_tiles(int row_pairs, const std::vector<ProductSum>& sums) {
  constexpr double kProducts = 0.25, kLeast = 0.3, kFromL2 = 0.9 / 8;  // of a step of the widest
  const int clusters = multiprocessors() / 2;
  int best = kWidest;
  double least = 0;
  for (const int blocks : {kWidest, 2, 1}) {
    int64_t tiles = 0;
    for (const ProductSum& sum : sums)
      if (sum.columns > kNarrowColumns)
        tiles += row_pairs * ((sum.columns + blocks * 64 - 1) / (blocks * 64));
    const double busy = static_cast<double>(std::min<int64_t>(tiles, clusters)) / clusters;
    const double step = std::max({blocks * kProducts, kLeast, (4 + blocks) * kFromL2 * busy});
    const double time = static_cast<double>((tiles + clusters - 1) / clusters) * step;
    if (blocks < kWidest && time >= least) continue;
    least = time;
    best = blocks;
  }
  return best;
}

/// Whether the widest tiles of one sum keep at least nine of ten multiprocessors busy.
inline bool product_sum_fills_device(int64_t rows, int64_t columns) {
  const int64_t clusters = multiprocessors() / 2;
  const int64_t tiles =
      ((rows + 2 * kRows - 1) / (2 * kRows)) * ((columns + kColumns - 1) / kColumns);
  return 10 * tiles >= 9 * ((tiles + clusters - 1) / clusters) * clusters;
}

}  // namespace heddle::ops::cuda
