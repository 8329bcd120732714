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

/// Rows of one token each whose sets stand in tables on the device, so that a call which was
/// recorded once serves any sets: "slots", which hold the factors' addresses.
struct LowRankSlots {
  static constexpr std::int64_t kMostRows = 8;  ///< A run has no more.
  /// [N,4] int32: consecutive rows of one set, as slot (-1: none, no change), first row, number of
  /// rows (0: the run is none) and 0. Every row is of one run.
  at::Tensor runs;
  /// For each layer that reads the input [slots,3] int64: the addresses of a [r,k] and b [n,r], and
  /// r in the low half and the bits of the scale, an fp32, in the high half of the third. Factors
  /// have the input's dtype, are contiguous and begin on 16 bytes. r 0: the set leaves the layer as
  /// it is.
  Tensors layers;
  std::vector<int> columns;  ///< n of each layer.
  std::int64_t rank = 0;     ///< A multiple of 16, no less than any r that a run has.
};
/// A row of LowRankSlots::layers, on the host. `a` undefined: no change.
at::Tensor slot_entry(const at::Tensor& a, const at::Tensor& b, double scaling);

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
    /// scaling x a^T of each layer's slots, x [T,k]: [T, layers x rank]. May run beside what the
    /// stream is given next, until add_slot_outputs. With it null where kernels have none.
    at::Tensor (*slot_lows)(const at::Tensor& x, const LowRankSlots& slots);
    /// outputs[layer] [T,n] += low b^T.
    void (*add_slot_outputs)(const Tensors& outputs, const at::Tensor& lows,
                             const LowRankSlots& slots);
    /// silu(gate + low b^T) * (up + low b^T) [T,n] of two layers, whose sums are rounded first.
    at::Tensor (*gated_slot_outputs)(const at::Tensor& gate, const at::Tensor& up,
                                     const at::Tensor& lows, const LowRankSlots& slots);
    /// scaling dy b, dy[layer] [T,n], is returned; `sums` get dy^T low of each change in their
    /// order, [n,r].
    at::Tensor (*d_lows_and_gradients_of_b)(const Tensors& dy, const at::Tensor& lows,
                                            const LowRankGroups& groups,
                                            const std::vector<FactorSum>& sums);
    /// dx [T,k] += d_low a.
    void (*add_input_gradient)(const at::Tensor& dx, const at::Tensor& d_lows,
                               const LowRankGroups& groups);
    /// d_low^T x of each change in their order, [r,k].
    void (*gradients_of_a)(const at::Tensor& x, const at::Tensor& d_lows,
                           const LowRankGroups& groups, const std::vector<FactorSum>& sums);
  };
};

/// Lows of the groups, uninitialised, beside `like`.
at::Tensor empty_lows(const at::Tensor& like, const LowRankGroups& groups);

}  // namespace heddle::ops
