// Joins the products of many sets' low-rank changes with ATen.
#include <algorithm>
#include <utility>

#include "ops/compute_type.h"
#include "ops/cuda/kernels.h"
#include "ops/cuda/tensor.h"
#include "ops/grouped_low_rank/cuda/grouped_products.h"
#include "ops/grouped_low_rank/cuda/low_blocks.h"
#include "ops/grouped_low_rank/cuda/slot_tensors.h"
#include "ops/grouped_low_rank/kernels.h"

namespace heddle::ops::grouped_low_rank_cuda {
namespace {

using Change = LowRankRows::Change;

std::int32_t narrow(std::int64_t size) { return static_cast<std::int32_t>(size); }

const void* row(const at::Tensor& matrix, std::int64_t first) {
  return static_cast<const char*>(matrix.const_data_ptr()) +
         first * matrix.stride(0) * matrix.element_size();
}

/// Whether the kernels take all matrices of a call.
bool fits(const Tensors& wide, const LowRankGroups& groups) {
  if (!std::all_of(wide.begin(), wide.end(), cuda::has_rows_of_16_bytes)) return false;
  for (const LowRankRows& rows : groups) {
    for (const Change& change : rows.changes) {
      if (!cuda::has_rows_of_16_bytes(change.a) || change.b.scalar_type() != at::kBFloat16 ||
          change.b.stride(1) != 1 || change.b.size(0) % 8 != 0 || change.a.size(1) % 8 != 0)
        return false;
    }
  }
  return true;
}

/// low = scaling times the rows of `tall` times one factor of the change.
cuda::NarrowProduct product_of(const at::Tensor& tall, const LowRankRows& rows,
                               const at::Tensor& factor, const Change& change, const Low& low) {
  cuda::NarrowProduct product;
  product.tall = row(tall, rows.first);
  product.tall_stride = tall.stride(0);
  product.narrow = factor.const_data_ptr();
  product.narrow_stride = factor.stride(0);
  product.out = low.data;
  product.out_stride = low.stride;
  product.m = narrow(rows.rows);
  product.k = narrow(tall.size(1));
  product.n = narrow(change.a.size(0));
  product.scale = static_cast<float>(change.scaling);
  return product;
}

at::Tensor lows(const at::Tensor& x, const LowRankGroups& groups) {
  if (!fits({x}, groups)) return grouped_low_rank_reference::functions().lows(x, groups);
  const cuda::OnDevice on(x);
  at::Tensor all = empty_lows(x, groups);
  std::vector<cuda::NarrowProduct> products;
  each(all, groups, [&](const LowRankRows& rows, const Change& change, const Low& low) {
    TORCH_CHECK(change.a.size(1) == x.size(1), "a low-rank change of ", x.sizes(), " by ",
                change.a.sizes());
    products.push_back(product_of(x, rows, change.a, change, low));
  });
  cuda::narrow_products(cuda::NarrowForm::kRows, products, on.stream());
  return all;
}

void add_outputs(const Tensors& outputs, const at::Tensor& lows, const LowRankGroups& groups) {
  if (!fits(outputs, groups))
    return grouped_low_rank_reference::functions().add_outputs(outputs, lows, groups);
  const cuda::OnDevice on(lows);
  std::vector<cuda::WideSum> sums;
  each(lows, groups, [&](const LowRankRows& rows, const Change& change, const Low& low) {
    const at::Tensor& y = outputs.at(change.layer);
    TORCH_CHECK(change.b.size(0) == y.size(1) && change.b.size(1) == change.a.size(0),
                "a low-rank change of ", y.sizes(), " by ", change.b.sizes(), " and ",
                change.a.sizes());
    cuda::WideSum sum;
    sum.y = const_cast<void*>(row(y, rows.first));
    sum.y_stride = y.stride(0);
    sum.m = narrow(rows.rows);
    sum.n = narrow(y.size(1));
    sum.terms = {{low.data, change.b.const_data_ptr(), low.stride, change.b.stride(0),
                  narrow(change.b.size(1))}};
    sums.push_back(std::move(sum));
  });
  cuda::wide_sums(/*b_has_depth_first=*/false, sums, on.stream());
}

void add_input_gradient(const at::Tensor& dx, const at::Tensor& d_lows,
                        const LowRankGroups& groups) {
  if (!fits({dx}, groups))
    return grouped_low_rank_reference::functions().add_input_gradient(dx, d_lows, groups);
  const cuda::OnDevice on(dx);
  std::vector<cuda::WideSum> sums;
  const LowRankRows* current = nullptr;
  each(d_lows, groups, [&](const LowRankRows& rows, const Change& change, const Low& d_low) {
    if (&rows != current || sums.back().terms.size() == cuda::kMostWideTerms) {
      TORCH_CHECK(&rows != current, "a low-rank change of more than ", cuda::kMostWideTerms,
                  " layers that share an input");
      current = &rows;
      sums.push_back({const_cast<void*>(row(dx, rows.first)),
                      dx.stride(0),
                      narrow(rows.rows),
                      narrow(dx.size(1)),
                      {}});
    }
    sums.back().terms.push_back({d_low.data, change.a.const_data_ptr(), d_low.stride,
                                 change.a.stride(0), narrow(change.a.size(0))});
  });
  cuda::wide_sums(/*b_has_depth_first=*/true, sums, on.stream());
}

/// Whether the kernels write all of these.
bool fits(const std::vector<FactorSum>& sums) {
  return std::all_of(sums.begin(), sums.end(), [](const FactorSum& into) {
    return !into.sum.defined() ||
           (into.sum.scalar_type() == at::kFloat && into.sum.is_contiguous());
  });
}

/// `tall_of` a change: all rows of the matrix beside the low.
template <class F>
void run_gradients(const at::Tensor& lows, const LowRankGroups& groups,
                   const std::vector<FactorSum>& sums, bool turned, const F& tall_of) {
  const cuda::OnDevice on(lows);
  std::vector<cuda::NarrowProduct> products;
  auto next = sums.begin();
  each(lows, groups, [&](const LowRankRows& rows, const Change& change, const Low& low) {
    const FactorSum& into = *next++;
    if (!into.sum.defined()) return;
    const at::Tensor& tall = tall_of(change);
    cuda::NarrowProduct product;
    product.tall = row(tall, rows.first);
    product.tall_stride = tall.stride(0);
    product.narrow = low.data;
    product.narrow_stride = low.stride;
    product.out = into.sum.mutable_data_ptr();
    product.out_stride = into.sum.size(1);
    product.m = narrow(tall.size(1));
    product.k = narrow(rows.rows);
    product.n = narrow(change.a.size(0));
    product.turned = turned;
    product.accumulates = into.adds;
    products.push_back(product);
  });
  cuda::narrow_products(cuda::NarrowForm::kGradients, products, on.stream());
}

at::Tensor d_lows_and_gradients_of_b(const Tensors& dy, const at::Tensor& lows,
                                     const LowRankGroups& groups,
                                     const std::vector<FactorSum>& sums) {
  if (!fits(dy, groups) || !fits(sums)) {
    return grouped_low_rank_reference::functions().d_lows_and_gradients_of_b(dy, lows, groups,
                                                                             sums);
  }
  const cuda::OnDevice on(lows);
  at::Tensor all = empty_lows(dy.at(0), groups);
  std::vector<cuda::NarrowProduct> products;
  each(all, groups, [&](const LowRankRows& rows, const Change& change, const Low& d_low) {
    products.push_back(product_of(dy.at(change.layer), rows, change.b, change, d_low));
  });
  std::vector<FactorSum> apart = sums;
  std::size_t next = 0;
  each(lows, groups, [&](const LowRankRows& rows, const Change&, const Low& low) {
    cuda::NarrowProduct& product = products[next];
    FactorSum& into = apart[next++];
    if (!into.sum.defined() || rows.rows == 0 || rows.rows > cuda::kMostRowsOfBoth) return;
    product.gradient = into.sum.mutable_data_ptr<float>();
    product.accumulates = into.adds;
    product.low = low.data;
    product.low_stride = low.stride;
    into.sum = at::Tensor();
  });
  run_gradients(lows, groups, apart, /*turned=*/false,
                [&](const Change& change) -> const at::Tensor& { return dy.at(change.layer); });
  cuda::narrow_products(cuda::NarrowForm::kDeep, products, on.stream());
  return all;
}

void gradients_of_a(const at::Tensor& x, const at::Tensor& d_lows, const LowRankGroups& groups,
                    const std::vector<FactorSum>& sums) {
  if (!fits({x}, groups) || !fits(sums))
    return grouped_low_rank_reference::functions().gradients_of_a(x, d_lows, groups, sums);
  run_gradients(d_lows, groups, sums, /*turned=*/true,
                [&](const Change&) -> const at::Tensor& { return x; });
}

std::optional<std::string> refuse_device(const Target&) {
  if (cuda::has_sm90a()) return std::nullopt;
  return "needs a device of compute capability 9.0 and a build with code for sm_90a";
}

}  // namespace
}  // namespace heddle::ops::grouped_low_rank_cuda

namespace heddle::ops::cuda {

void add_grouped_low_rank(Registry& registry) {
  using namespace grouped_low_rank_cuda;
  KernelInfo own = KernelInfo::cuda("cuda.sm90_grouped", {c10::ScalarType::BFloat16});
  own.refuse_device = refuse_device;
  own.falls_back =
      "cuBLAS, set by set, for widths not a multiple of 8 or rows not starting on 16 bytes";
  // Names of the kernels themselves hide those of the functions that join them here.
  registry.add<GroupedLowRank>(
      own, {lows, add_outputs, grouped_low_rank_cuda::slot_lows,
            grouped_low_rank_cuda::add_slot_outputs, grouped_low_rank_cuda::gated_slot_outputs,
            d_lows_and_gradients_of_b, add_input_gradient, gradients_of_a});
  GroupedLowRank::Functions library = grouped_low_rank_reference::functions();
  // The reference reads the tables on the host, which no recording can.
  library.slot_lows = nullptr;
  library.add_slot_outputs = nullptr;
  library.gated_slot_outputs = nullptr;
  registry.add<GroupedLowRank>(KernelInfo::cuda("cuda.cublas", reference_dtypes()), library);
}

}  // namespace heddle::ops::cuda
