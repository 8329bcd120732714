#pragma once

#include <cstddef>
#include <cstdint>
#include <vector>

#include "ops/autograd.h"
#include "ops/registry.h"

namespace heddle::ops {

/// Consecutive rows of an input, and the low-rank changes of layers that read it there.
struct LowRankRows {
  /// y += scaling (x a^T) b^T. Ranks, layers and their number differ between rows.
  struct Change {
    std::size_t layer = 0;  ///< Its place among the layers that share the input.
    at::Tensor a, b;        ///< [r,k], [n,r]
    double scaling = 1;
  };
  std::int64_t first = 0, rows = 0;
  std::vector<Change> changes;

  /// Columns of its block of the lows, and the first of a change's, which begins on 16 bytes.
  std::int64_t width() const { return column_of(changes.size()); }
  std::int64_t column_of(std::size_t change) const;
};
using LowRankGroups = std::vector<LowRankRows>;

/// Gets the gradient of a factor, contiguous, not narrower than the compute type.
struct FactorSum {
  at::Tensor sum;     ///< Undefined: nobody asks for it.
  bool adds = false;  ///< To what is there, instead of over it.
};

/// Low-rank changes of rows that belong to several sets of adapters, all of them at once: on a GPU
/// more sets take no more launches. Lows [sum of rows x width] are the blocks of all rows one
/// after the other, each [rows, width], of the input's dtype; what no change has there are zeros.
/// Not differentiable by itself; see nn/changed_rows.h.
struct GroupedLowRank {
  static constexpr const char* kName = "grouped_low_rank";
  using Dims = AnyDims;
  /// All null: the products of one set come after those of another, as linear's kernel makes them.
  struct Functions {
    /// scaling x a^T, x [T,k].
    at::Tensor (*lows)(const at::Tensor& x, const LowRankGroups& groups);
    /// outputs[layer] [T,n] += low b^T.
    void (*add_outputs)(const Tensors& outputs, const at::Tensor& lows,
                        const LowRankGroups& groups);
    /// scaling dy b, dy[layer] [T,n].
    at::Tensor (*d_lows)(const Tensors& dy, const LowRankGroups& groups);
    /// dx [T,k] += d_low a.
    void (*add_input_gradient)(const at::Tensor& dx, const at::Tensor& d_lows,
                               const LowRankGroups& groups);
    /// dy^T low of each change in their order, [n,r].
    void (*gradients_of_b)(const Tensors& dy, const at::Tensor& lows, const LowRankGroups& groups,
                           const std::vector<FactorSum>& sums);
    /// d_low^T x of each change in their order, [r,k].
    void (*gradients_of_a)(const at::Tensor& x, const at::Tensor& d_lows,
                           const LowRankGroups& groups, const std::vector<FactorSum>& sums);
  };
};

/// Lows of the groups, uninitialised, beside `like`.
at::Tensor empty_lows(const at::Tensor& like, const LowRankGroups& groups);

}  // namespace heddle::ops
