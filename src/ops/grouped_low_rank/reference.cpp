#include <ATen/TensorOperators.h>
#include <ATen/ops/mm.h>
#include <ATen/ops/zeros.h>

#include "ops/grouped_low_rank/kernels.h"
#include "ops/linear/linear.h"

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

at::Tensor d_lows(const Tensors& dy, const LowRankGroups& groups) {
  const at::Tensor all = empty_lows(dy.at(0), groups).zero_();
  each(all, groups, [&](const LowRankRows& rows, const Change& change, const at::Tensor& d_low) {
    at::Tensor(d_low).copy_(at::mm(own(rows, dy.at(change.layer)), change.b).mul_(change.scaling));
  });
  return all;
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

void gradients_of_b(const Tensors& dy, const at::Tensor& lows, const LowRankGroups& groups,
                    const std::vector<FactorSum>& sums) {
  auto next = sums.begin();
  each(lows, groups, [&](const LowRankRows& rows, const Change& change, const at::Tensor& low) {
    put(*next++, own(rows, dy.at(change.layer)), low);
  });
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
  return {lows, add_outputs, d_lows, add_input_gradient, gradients_of_b, gradients_of_a};
}

}  // namespace heddle::ops::grouped_low_rank_reference
