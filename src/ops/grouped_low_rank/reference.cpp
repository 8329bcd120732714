#include <ATen/TensorOperators.h>
#include <ATen/ops/from_blob.h>
#include <ATen/ops/mm.h>
#include <ATen/ops/zeros.h>

#include <bit>

#include "ops/grouped_low_rank/kernels.h"
#include "ops/linear/linear.h"
#include "ops/swiglu/kernels.h"

namespace heddle::ops::grouped_low_rank_reference {
namespace {

using Change = LowRankRows::Change;

/// Runs f(rows, change, its part of the lows) for each change.
template <class F>
void each(const at::Tensor& lows, const LowRankGroups& groups, const F& f) {
  std::int64_t first = 0;
  for (const LowRankRows& rows : groups) {
    const at::Tensor block =
        lows.narrow(0, first, rows.rows * rows.width()).view({rows.rows, rows.width()});
    first += block.numel();
    for (std::size_t i = 0; i < rows.changes.size(); ++i) {
      const Change& change = rows.changes[i];
      f(rows, change, block.narrow(1, rows.column_of(i), change.a.size(0)));
    }
  }
}

at::Tensor own(const LowRankRows& rows, const at::Tensor& all) {
  return all.narrow(0, rows.first, rows.rows);
}

at::Tensor lows(const at::Tensor& x, const LowRankGroups& groups) {
  const at::Tensor all = empty_lows(x, groups).zero_();
  each(all, groups, [&](const LowRankRows& rows, const Change& change, const at::Tensor& low) {
    at::Tensor(low).copy_(at::mm(own(rows, x), change.a.t()).mul_(change.scaling));
  });
  return all;
}

void add_outputs(const Tensors& outputs, const at::Tensor& lows, const LowRankGroups& groups) {
  each(lows, groups, [&](const LowRankRows& rows, const Change& change, const at::Tensor& low) {
    own(rows, outputs.at(change.layer)).addmm_(low, change.b.t());
  });
}

/// Runs f(layer, first row, rows, entry of the layer) for each change of the slots.
template <class F>
void each_slot(const LowRankSlots& slots, const F& f) {
  const at::Tensor runs = slots.runs.cpu();
  const auto* const numbers = runs.const_data_ptr<std::int32_t>();
  for (std::size_t layer = 0; layer < slots.layers.size(); ++layer) {
    const at::Tensor entries = slots.layers[layer].cpu().contiguous();
    for (std::int64_t i = 0; i < runs.size(0); ++i) {
      const std::int32_t* const run = numbers + 4 * i;
      if (run[0] < 0) continue;
      const std::int64_t* const entry = entries.const_data_ptr<std::int64_t>() + 3 * run[0];
      if (run[2] > 0 && (entry[2] & 0xffffffff) > 0)
        f(static_cast<std::int64_t>(layer), run[1], run[2], entry);
    }
  }
}

at::Tensor factor_at(std::int64_t address, std::int64_t rows, std::int64_t columns,
                     const at::Tensor& like) {
  return at::from_blob(reinterpret_cast<void*>(static_cast<std::intptr_t>(address)),
                       {rows, columns}, like.options());
}

at::Tensor slot_lows(const at::Tensor& x, const LowRankSlots& slots) {
  const auto layers = static_cast<std::int64_t>(slots.layers.size());
  const at::Tensor all = at::zeros({x.size(0), layers * slots.rank}, x.options());
  each_slot(slots, [&](std::int64_t layer, std::int64_t first, std::int64_t rows,
                       const std::int64_t* entry) {
    const std::int64_t rank = entry[2] & 0xffffffff;
    const auto scale = std::bit_cast<float>(static_cast<std::uint32_t>(entry[2] >> 32));
    const at::Tensor a = factor_at(entry[0], rank, x.size(1), x);
    all.narrow(0, first, rows)
        .narrow(1, layer * slots.rank, rank)
        .copy_(at::mm(x.narrow(0, first, rows), a.t()).mul_(scale));
  });
  return all;
}

void add_slot_outputs(const Tensors& outputs, const at::Tensor& lows, const LowRankSlots& slots) {
  each_slot(slots, [&](std::int64_t layer, std::int64_t first, std::int64_t rows,
                       const std::int64_t* entry) {
    const std::int64_t rank = entry[2] & 0xffffffff;
    const at::Tensor& y = outputs.at(static_cast<std::size_t>(layer));
    const at::Tensor b = factor_at(entry[1], y.size(1), rank, y);
    y.narrow(0, first, rows)
        .addmm_(lows.narrow(0, first, rows).narrow(1, layer * slots.rank, rank), b.t());
  });
}

at::Tensor gated_slot_outputs(const at::Tensor& gate, const at::Tensor& up, const at::Tensor& lows,
                              const LowRankSlots& slots) {
  const Tensors sums = {gate.clone(), up.clone()};
  add_slot_outputs(sums, lows, slots);
  return swiglu_reference::forward(sums[0], sums[1]);
}

void add_input_gradient(const at::Tensor& dx, const at::Tensor& d_lows,
                        const LowRankGroups& groups) {
  each(d_lows, groups, [&](const LowRankRows& rows, const Change& change, const at::Tensor& d_low) {
    own(rows, dx).addmm_(d_low, change.a);
  });
}

void put(const FactorSum& into, const at::Tensor& left, const at::Tensor& right) {
  at::Tensor sum = into.sum;
  if (!sum.defined()) return;
  const at::Tensor gradient = wide_product(left, right);
  into.adds ? sum.add_(gradient) : sum.copy_(gradient);
}

at::Tensor d_lows_and_gradients_of_b(const Tensors& dy, const at::Tensor& lows,
                                     const LowRankGroups& groups,
                                     const std::vector<FactorSum>& sums) {
  auto next = sums.begin();
  each(lows, groups, [&](const LowRankRows& rows, const Change& change, const at::Tensor& low) {
    put(*next++, own(rows, dy.at(change.layer)), low);
  });
  const at::Tensor all = empty_lows(dy.at(0), groups).zero_();
  each(all, groups, [&](const LowRankRows& rows, const Change& change, const at::Tensor& d_low) {
    at::Tensor(d_low).copy_(at::mm(own(rows, dy.at(change.layer)), change.b).mul_(change.scaling));
  });
  return all;
}

void gradients_of_a(const at::Tensor& x, const at::Tensor& d_lows, const LowRankGroups& groups,
                    const std::vector<FactorSum>& sums) {
  auto next = sums.begin();
  each(d_lows, groups, [&](const LowRankRows& rows, const Change&, const at::Tensor& d_low) {
    put(*next++, d_low, own(rows, x));
  });
}

}  // namespace

GroupedLowRank::Functions functions() {
  return {lows,
          add_outputs,
          slot_lows,
          add_slot_outputs,
          gated_slot_outputs,
          d_lows_and_gradients_of_b,
          add_input_gradient,
          gradients_of_a};
}

}  // namespace heddle::ops::grouped_low_rank_reference
