// Low-rank changes of some rows as terms of the layers' own products.
#include "ops/grouped_low_rank/in_products.h"

#include <ATen/ops/empty.h>

#include <algorithm>

#include "ops/cuda/tensor.h"
#include "ops/grouped_low_rank/cuda/low_blocks.h"
#include "ops/linear/cuda/product_sum_tensors.h"
#include "ops/linear/kernels.h"

namespace heddle::ops {
namespace {

using Change = LowRankRows::Change;
using Columns = std::vector<std::int64_t>;

bool fits(const Linear::Functions& linear, const std::vector<Products>& sums,
          const Columns& columns, const at::Tensor& lows, const LowRankGroups& groups) {
  if (linear.forward != linear_cuda::forward || lows.scalar_type() != at::kBFloat16 ||
      !linear_cuda::can_sum(sums, columns))
    return false;
  std::size_t terms = 0;
  for (const Products& sum : sums) terms += sum.size();
  for (const LowRankRows& rows : groups) {
    terms += rows.changes.size();
    for (const Change& change : rows.changes) {
      if (!cuda::has_rows_of_16_bytes(change.a) || !cuda::has_rows_of_16_bytes(change.b))
        return false;
    }
  }
  return terms <= cuda::kMostProductTerms;
}

/// One result for each sum. `sum_of` names a change's, `factor_of` the matrix that its low meets.
template <class Sum, class Factor>
Tensors run(const std::vector<Products>& sums, const Columns& columns, bool b_has_depth_first,
            const at::Tensor& start, const at::Tensor& lows, const LowRankGroups& groups,
            const Sum& sum_of, const Factor& factor_of) {
  const at::Tensor& first = sums[0][0].a;
  const cuda::OnDevice on(first);
  Tensors results;
  std::vector<cuda::ProductSum> work;
  for (std::size_t i = 0; i < sums.size(); ++i) {
    results.push_back(linear_cuda::result_like(first, columns[i]));
    cuda::ProductSum sum;
    sum.y = results[i].mutable_data_ptr();
    sum.y_stride = results[i].stride(0);
    sum.columns = columns[i];
    if (start.defined()) {
      sum.start = start.const_data_ptr();
      sum.start_stride = start.stride(0);
    }
    for (const auto& [a, b, place] : sums[i]) {
      TORCH_CHECK(a.size(0) == first.size(0) && a.size(1) == b.size(b_has_depth_first ? 0 : 1),
                  "a product of ", a.sizes(), " and ", b.sizes());
      sum.terms.push_back(
          {a.const_data_ptr(), a.stride(0), b.const_data_ptr(), b.stride(0), a.size(1)});
    }
    work.push_back(std::move(sum));
  }
  grouped_low_rank_cuda::each(
      lows, groups,
      [&](const LowRankRows& rows, const Change& change, const grouped_low_rank_cuda::Low& low) {
        if (rows.rows == 0) return;
        const at::Tensor& factor = factor_of(change);
        work.at(sum_of(change))
            .terms.push_back({low.data, low.stride, factor.const_data_ptr(), factor.stride(0),
                              change.a.size(0), rows.first, rows.rows});
      });
  cuda::product_sums(first.size(0), work, b_has_depth_first, on.stream());
  return results;
}

}  // namespace

Tensors outputs_with_lows(const Linear::Functions& linear, const std::vector<Products>& sums,
                          const at::Tensor& residual, const at::Tensor& lows,
                          const LowRankGroups& groups) {
  Columns columns;
  for (const Products& sum : sums) columns.push_back(sum.at(0).b.size(0));
  if (!fits(linear, sums, columns, lows, groups)) return {};
  if (residual.defined() && (sums.size() > 1 || !cuda::has_rows_of_16_bytes(residual))) return {};
  return run(
      sums, columns, /*b_has_depth_first=*/false, residual, lows, groups,
      [](const Change& change) { return change.layer; },
      [](const Change& change) -> const at::Tensor& { return change.b; });
}

at::Tensor input_gradient_with_lows(const Linear::Functions& linear, const Products& terms,
                                    const at::Tensor& d_lows, const LowRankGroups& groups) {
  const Columns columns = {terms.at(0).b.size(1)};
  if (!fits(linear, {terms}, columns, d_lows, groups)) return {};
  return run(
      {terms}, columns, /*b_has_depth_first=*/true, {}, d_lows, groups,
      [](const Change&) { return std::size_t{0}; },
      [](const Change& change) -> const at::Tensor& { return change.a; })[0];
}

}  // namespace heddle::ops
