#pragma once

#include <ATen/TensorOperators.h>
#include <ATen/ops/full.h>
#include <ATen/ops/mm.h>
#include <ATen/ops/stack.h>
#include <ATen/ops/zeros.h>

#include <algorithm>
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

/// Layers whose rows have sets by slot. Rows of no set lie between and behind the others.
struct SlotCase {
  at::Tensor x;                               ///< [T,k]
  Tensors y;                                  ///< [T,n] of each layer.
  std::vector<std::int64_t> of_row;           ///< Slot of each row; -1: none.
  std::vector<std::vector<Tensors>> factors;  ///< [layers][slots]: a and b; none: no change.
  std::vector<double> scales;                 ///< Each slot's.

  /// `ranks` of each slot, the same for all layers but that a layer's number is skipped by slot
  /// `number`: that one leaves it as it is.
  static SlotCase of(std::int64_t width, const std::vector<std::int64_t>& columns,
                     const std::vector<std::int64_t>& ranks, std::vector<std::int64_t> of_row) {
    SlotCase c;
    std::uint64_t seed = 500;
    const auto rows = static_cast<std::int64_t>(of_row.size());
    c.of_row = std::move(of_row);
    c.x = randn({rows, width}, at::kDouble, ++seed);
    for (std::size_t s = 0; s < ranks.size(); ++s)
      c.scales.push_back(0.5 + 0.25 * static_cast<double>(s));
    for (std::size_t layer = 0; layer < columns.size(); ++layer) {
      c.y.push_back(randn({rows, columns[layer]}, at::kDouble, ++seed));
      c.factors.emplace_back();
      for (std::size_t s = 0; s < ranks.size(); ++s) {
        const bool is_changed = ranks[s] > 0 && (s != layer || columns.size() == 1);
        c.factors.back().push_back(
            is_changed ? Tensors{randn({ranks[s], width}, at::kDouble, ++seed),
                                 randn({columns[layer], ranks[s]}, at::kDouble, ++seed)}
                       : Tensors());
      }
    }
    return c;
  }

  template <class F>
  SlotCase with(const F& move) const {
    SlotCase c = *this;
    c.x = move(x);
    for (at::Tensor& one : c.y) one = move(one);
    for (auto& layer : c.factors) {
      for (Tensors& pair : layer) {
        for (at::Tensor& factor : pair) factor = move(factor);
      }
    }
    return c;
  }
  /// The rows of these numbers alone.
  SlotCase rows(std::int64_t first, std::int64_t count) const {
    SlotCase c = *this;
    c.x = x.narrow(0, first, count).contiguous();
    for (at::Tensor& one : c.y) one = one.narrow(0, first, count).contiguous();
    c.of_row.assign(of_row.begin() + first, of_row.begin() + first + count);
    return c;
  }
  bool is_one_set() const {
    std::int64_t slot = -1;
    for (const std::int64_t own : of_row) {
      if (own >= 0 && slot >= 0 && own != slot) return false;
      slot = std::max(slot, own);
    }
    return true;
  }
  /// The tables, on the factors' device; the case outlives them.
  LowRankSlots slots() const {
    LowRankSlots slots;
    at::Tensor runs = at::zeros({x.size(0), 4}, at::kInt);
    std::int64_t next = 0;
    for (std::size_t first = 0; first < of_row.size();) {
      std::size_t last = first;
      while (last < of_row.size() && of_row[last] == of_row[first] && last - first < 8) ++last;
      const at::Tensor run = runs.select(0, next++);
      run[0] = of_row[first];
      run[1] = static_cast<std::int64_t>(first);
      run[2] = static_cast<std::int64_t>(last - first);
      first = last;
    }
    slots.runs = runs.to(x.device());
    for (std::size_t layer = 0; layer < y.size(); ++layer) {
      Tensors entries;
      for (std::size_t s = 0; s < scales.size(); ++s) {
        const Tensors& pair = factors[layer][s];
        entries.push_back(pair.empty() ? slot_entry({}, {}, 0)
                                       : slot_entry(pair[0], pair[1], scales[s]));
        if (!pair.empty()) slots.rank = std::max(slots.rank, (pair[0].size(0) + 15) / 16 * 16);
      }
      slots.layers.push_back(at::stack(entries).to(x.device()));
      slots.columns.push_back(static_cast<int>(y[layer].size(1)));
    }
    return slots;
  }
  /// y with the changes, written down row by row.
  Tensors defined() const {
    Tensors outputs;
    for (std::size_t layer = 0; layer < y.size(); ++layer) {
      outputs.push_back(y[layer].clone());
      for (std::size_t i = 0; i < of_row.size(); ++i) {
        if (of_row[i] < 0) continue;
        const auto slot = static_cast<std::size_t>(of_row[i]);
        const Tensors& pair = factors[layer][slot];
        if (pair.empty()) continue;
        const auto row = static_cast<std::int64_t>(i);
        outputs.back().narrow(0, row, 1).add_(
            at::mm(at::mm(x.narrow(0, row, 1), pair[0].t()), pair[1].t()), scales[slot]);
      }
    }
    if (outputs.size() > 1 && outputs[0].sizes() == outputs[1].sizes())
      outputs.push_back(outputs[0] * outputs[0].sigmoid() * outputs[1]);
    return outputs;
  }
};

inline Tensors run(const GroupedLowRank::Functions& f, const SlotCase& c) {
  Tensors outputs;
  for (const at::Tensor& y : c.y) outputs.push_back(y.clone());
  const LowRankSlots slots = c.slots();
  const at::Tensor lows = f.slot_lows(c.x, slots);
  f.add_slot_outputs(outputs, lows, slots);
  if (outputs.size() > 1 && outputs[0].sizes() == outputs[1].sizes())
    outputs.push_back(f.gated_slot_outputs(c.y[0], c.y[1], lows, slots));
  return outputs;
}

}  // namespace heddle::ops::testing
