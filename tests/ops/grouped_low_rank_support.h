#pragma once

#include <ATen/TensorOperators.h>
#include <ATen/ops/full.h>

#include <cmath>
#include <optional>

#include "ops/grouped_low_rank/grouped_low_rank.h"
#include "ops/operator_support.h"

namespace heddle::ops::testing {

/// Layers that share an input, rows of several sets, and gradients: all that the operator reads.
struct GroupedCase {
  std::int64_t rows = 0, width = 0;
  std::vector<std::int64_t> columns;  ///< Widths of the layers.
  at::Tensor x;
  Tensors dy;
  LowRankGroups groups;

  /// `ranks` of each segment; a rank of 0: that layer has no change. Rows between segments, and
  /// behind the last, belong to none.
  static GroupedCase of(std::int64_t width, std::vector<std::int64_t> columns,
                        const std::vector<std::int64_t>& segment_rows,
                        const std::vector<std::vector<std::int64_t>>& ranks, std::int64_t gap = 3) {
    GroupedCase c;
    c.width = width;
    c.columns = std::move(columns);
    std::uint64_t seed = 100;
    for (std::size_t s = 0; s < segment_rows.size(); ++s) {
      LowRankRows group{c.rows, segment_rows[s], {}};
      c.rows += segment_rows[s] + gap;
      for (std::size_t i = 0; i < c.columns.size(); ++i) {
        const std::int64_t rank = ranks[s][i];
        if (rank == 0) continue;
        group.changes.push_back({i, randn({rank, width}, at::kDouble, ++seed),
                                 randn({c.columns[i], rank}, at::kDouble, ++seed),
                                 0.5 + 0.25 * static_cast<double>(s)});
      }
      c.groups.push_back(std::move(group));
    }
    c.x = randn({c.rows, width}, at::kDouble, ++seed);
    for (const std::int64_t n : c.columns) c.dy.push_back(randn({c.rows, n}, at::kDouble, ++seed));
    return c;
  }

  /// The tensors in another form.
  template <class F>
  GroupedCase with(const F& move) const {
    GroupedCase c = *this;
    c.x = move(x);
    for (at::Tensor& dy : c.dy) dy = move(dy);
    for (LowRankRows& group : c.groups) {
      for (auto& change : group.changes) change.a = move(change.a), change.b = move(change.b);
    }
    return c;
  }
};

/// Results of the operator for a case.
struct GroupedResult {
  Tensors outputs;  ///< dy with the changes of the outputs on top.
  at::Tensor dx;    ///< x with the input's gradient on top.
  Tensors d_b, d_a;

  Tensors all() const {
    Tensors tensors = outputs;
    tensors.push_back(dx);
    tensors.insert(tensors.end(), d_b.begin(), d_b.end());
    tensors.insert(tensors.end(), d_a.begin(), d_a.end());
    return tensors;
  }
};

/// `first`: every gradient is added to sums that hold this number; none: written over NaN.
inline GroupedResult run(const GroupedLowRank::Functions& f, const GroupedCase& c,
                         std::optional<double> first = {}) {
  GroupedResult result;
  for (const at::Tensor& dy : c.dy) result.outputs.push_back(dy.clone());
  result.dx = c.x.clone();
  const at::Tensor lows = f.lows(c.x, c.groups), d_lows = f.d_lows(c.dy, c.groups);
  f.add_outputs(result.outputs, lows, c.groups);
  f.add_input_gradient(result.dx, d_lows, c.groups);
  std::vector<FactorSum> b, a;
  const auto wide = c.x.scalar_type() == at::kDouble ? at::kDouble : at::kFloat;
  for (const LowRankRows& group : c.groups) {
    for (const auto& change : group.changes) {
      const auto place = [&](const at::Tensor& factor) {
        return FactorSum{at::full(factor.sizes(), first.value_or(NAN), c.x.options().dtype(wide)),
                         first.has_value()};
      };
      b.push_back(place(change.b));
      a.push_back(place(change.a));
    }
  }
  f.gradients_of_b(c.dy, lows, c.groups, b);
  f.gradients_of_a(c.x, d_lows, c.groups, a);
  for (const FactorSum& into : b) result.d_b.push_back(into.sum);
  for (const FactorSum& into : a) result.d_a.push_back(into.sum);
  return result;
}

}  // namespace heddle::ops::testing
