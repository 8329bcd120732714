// Joins the kernel of few rows with ATen.
#include "ops/linear/cuda/few_row_tensors.h"

#include <ATen/ops/addmm.h>
#include <ATen/ops/empty.h>
#include <ATen/ops/mm.h>

#include <algorithm>

#include "ops/cuda/tensor.h"
#include "ops/grouped_low_rank/cuda/slot_tensors.h"
#include "ops/kernel_choice.h"
#include "ops/linear/cuda/batch_rows.h"
#include "ops/linear/cuda/few_rows.h"
#include "ops/linear/few_row_layers.h"
#include "ops/linear/few_row_lows.h"
#include "ops/linear/kernels.h"

namespace heddle::ops::linear_cuda {
namespace {

/// Columns of a decoder layer's projections. Of a head of a few labels, and of the vocabulary,
/// cuBLAS is as fast.
constexpr std::int64_t kFewestColumns = 512, kMostColumns = 65536;

/// Whether the kernel of few rows can take them at all.
bool can_be_few_rows(const std::vector<Products>& sums) {
  const std::int64_t rows = sums[0][0].a.size(0);
  if (rows < 1 || rows >= kFewestRows || sums.size() > cuda::kMostFewRowSums) return false;
  for (const Products& sum : sums) {
    if (sum.size() > cuda::kMostFewRowTerms) return false;
    for (const Product& product : sum) {
      if (!cuda::has_rows_of_16_bytes(product.a) || !cuda::has_rows_of_16_bytes(product.b) ||
          product.a.size(1) % 8 != 0 || product.a.size(0) != rows ||
          product.a.size(1) != product.b.size(1))
        return false;
    }
  }
  return true;
}

/// A sum that writes y and adds to `start`, if that is defined.
cuda::FewRowSum sum_into(const at::Tensor& y, const at::Tensor& start) {
  cuda::FewRowSum sum;
  sum.columns = static_cast<int>(y.size(1));
  sum.y = y.mutable_data_ptr();
  sum.y_stride = y.stride(0);
  if (start.defined()) {
    sum.start = start.const_data_ptr();
    sum.start_stride = start.stride(0);
  }
  return sum;
}

cuda::FewRowTerm term_of(const at::Tensor& a, const at::Tensor& b) {
  return {a.const_data_ptr(), b.const_data_ptr(), a.stride(0), b.stride(0),
          static_cast<int>(a.size(1))};
}

/// Columns up to which a product of some rows costs cuBLAS a launch and little else.
constexpr std::int64_t kNarrow = 64;
/// The deepest low-rank term that the kernel of few rows adds in one pass over the output.
constexpr std::int64_t kLowDepth = 128;

bool is_narrow(const Products& sum) { return sum[0].b.size(0) <= kNarrow; }

bool has_change(const FewRowLayers::Layer& layer) { return layer.a.defined(); }

/// The change of layer `i`; its lows are columns of `lows`, see empty_lows().
cuda::FewRowChange change_of(const FewRowLayers& call, std::size_t i, const at::Tensor& lows,
                             std::int64_t first) {
  const FewRowLayers::Layer& layer = call.layers[i];
  cuda::FewRowChange change;
  if (!call.slots && !has_change(layer)) return change;
  change.low = lows.narrow(1, first, 1).mutable_data_ptr();
  change.low_stride = lows.stride(0);
  if (call.slots) {
    change.slots = static_cast<const cuda::SlotFactors*>(call.slots->layers.at(i).const_data_ptr());
    return change;
  }
  change.a = layer.a.const_data_ptr();
  change.b = layer.b.const_data_ptr();
  change.a_stride = layer.a.stride(0);
  change.b_stride = layer.b.stride(0);
  change.rank = static_cast<int>(layer.a.size(0));
  change.scale = static_cast<float>(layer.scaling);
  return change;
}

/// Columns of a layer's lows: its rank, or that of all its slots, in whole tiles.
std::int64_t low_columns(const FewRowLayers& call, std::size_t i) {
  constexpr std::int64_t kTile = 16;
  if (call.slots) return call.slots->rank;
  return has_change(call.layers[i]) ? (call.layers[i].a.size(0) + kTile - 1) / kTile * kTile : 0;
}

/// Whether they are as wide as the layers of a decoder.
bool are_many_columns(const std::vector<Products>& sums) {
  std::int64_t columns = 0;
  for (const Products& sum : sums) columns += sum[0].b.size(0);
  return columns >= kFewestColumns && columns <= kMostColumns;
}

/// Whether the kernel of a batch's rows takes them.
bool are_batch_rows(const std::vector<Products>& sums) {
  return sums[0][0].a.size(0) <= cuda::kMostBatchRows && cuda::batch_rows_available() &&
         are_many_columns(sums) && can_be_few_rows(sums);
}

/// Whether the layers are one launch.
bool fit_one_launch(const FewRowLayers& call) {
  std::vector<Products> sums;
  for (const FewRowLayers::Layer& layer : call.layers) {
    sums.push_back({{call.x, layer.weight}});
    if (!has_change(layer)) continue;
    if (!cuda::has_rows_of_16_bytes(layer.a) || !cuda::has_rows_of_16_bytes(layer.b) ||
        layer.a.size(0) % 8 != 0)
      return false;
  }
  return (are_few_rows(sums) || are_batch_rows(sums)) &&
         (!call.residual.defined() || call.residual.stride(1) == 1) &&
         (!call.is_gated || sums[0][0].b.strides() == sums[1][0].b.strides());
}

}  // namespace

bool are_few_rows(const std::vector<Products>& sums) {
  return sums[0][0].a.size(0) <= cuda::kMostFewRows && are_many_columns(sums) &&
         can_be_few_rows(sums);
}

Tensors run_few_rows(const std::vector<Products>& sums, const at::Tensor& start,
                     const std::vector<double>& scales) {
  const at::Tensor& first = sums[0][0].a;
  const cuda::OnDevice on(first);
  Tensors results;
  std::vector<cuda::FewRowSum> work;
  for (const Products& products : sums) {
    results.push_back(at::empty({first.size(0), products[0].b.size(0)}, first.options()));
    cuda::FewRowSum sum = sum_into(results.back(), start);
    for (const auto& [a, b, place] : products) sum.terms[sum.term_count++] = term_of(a, b);
    if (!scales.empty()) sum.scale = static_cast<float>(scales[work.size()]);
    work.push_back(sum);
  }
  cuda::few_row_sums(static_cast<int>(first.size(0)), work, on.stream());
  return results;
}

bool are_some_rows(const std::vector<Products>& sums) {
  if (sums[0][0].a.size(0) <= cuda::kMostFewRows || !can_be_few_rows(sums)) return false;
  bool gains = false;
  for (const Products& sum : sums) {
    for (std::size_t t = 1; t < sum.size(); ++t) {
      if (sum[t].a.size(1) > kLowDepth) return false;
    }
    gains |= sum.size() > 1 || (sums.size() > 1 && is_narrow(sum));
  }
  return gains;
}

Tensors run_some_rows(const std::vector<Products>& sums, const at::Tensor& start) {
  const at::Tensor& first = sums[0][0].a;
  const cuda::OnDevice on(first);
  Tensors results;
  std::vector<cuda::FewRowSum> narrow, low;
  for (const Products& products : sums) {
    if (is_narrow(products)) {
      results.push_back(at::empty({first.size(0), products[0].b.size(0)}, first.options()));
      narrow.push_back(sum_into(results.back(), start));
      for (const auto& [a, b, place] : products)
        narrow.back().terms[narrow.back().term_count++] = term_of(a, b);
      continue;
    }
    const auto& [a, b, place] = products[0];
    results.push_back(start.defined() ? at::addmm(start, a, b.t()) : at::mm(a, b.t()));
    const at::Tensor& y = results.back();
    if (products.size() > 1) {
      low.push_back(sum_into(y, y));
      low.back().terms[low.back().term_count++] = term_of(products[1].a, products[1].b);
    }
  }
  const int rows = static_cast<int>(first.size(0));
  if (!narrow.empty()) cuda::few_row_sums(rows, narrow, on.stream());
  if (!low.empty()) cuda::few_row_sums(rows, low, on.stream());
  return results;
}

}  // namespace heddle::ops::linear_cuda

namespace heddle::ops {

Tensors few_row_layers(const KernelTable& kernels, const FewRowLayers& call) {
  using namespace linear_cuda;
  if (kernels.get<Linear>().forward != forward || !fit_one_launch(call)) return {};
  if (call.norm && !chose(kernels, "rms_norm", "cuda.fused")) return {};
  if (call.is_gated && !chose(kernels, "swiglu", "cuda.fused")) return {};
  if (call.slots && !chose(kernels, "grouped_low_rank", "cuda.sm90_grouped")) return {};
  const cuda::OnDevice on(call.x);
  cuda::FewRowNorm norm;
  if (call.norm) {
    norm = {call.norm->value.const_data_ptr(), cuda::element_of(call.norm->value),
            call.norm->offset, static_cast<float>(call.eps)};
  }
  std::int64_t width = 0;
  for (std::size_t i = 0; i < call.layers.size(); ++i) width += low_columns(call, i);
  const at::Tensor lows = at::empty({call.x.size(0), width}, call.x.options());
  cuda::FewRowSlots slots;
  if (call.slots) {
    const cuda::SlotLayers tables = grouped_low_rank_cuda::slot_layers(*call.slots);
    slots = {tables.runs, tables.run_count, tables.rank,
             static_cast<int>(call.slots->layers.at(0).size(0))};
  }
  std::int64_t first = 0;
  Tensors results;
  std::vector<cuda::FewRowSum> work;
  for (std::size_t i = 0; i < call.layers.size(); ++i) {
    const FewRowLayers::Layer& layer = call.layers[i];
    const cuda::FewRowChange change = change_of(call, i, lows, first);
    first += low_columns(call, i);
    if (call.is_gated && i == 1) {
      work[0].up = layer.weight.const_data_ptr();
      work[0].up_change = change;
      continue;
    }
    results.push_back(at::empty({call.x.size(0), layer.weight.size(0)}, call.x.options()));
    work.push_back(sum_into(results.back(), call.residual));
    work.back().terms[0] = term_of(call.x, layer.weight);
    work.back().term_count = 1;
    work.back().change = change;
  }
  const int rows = static_cast<int>(call.x.size(0));
  cuda::batch_rows_available() && cuda::batch_rows_are_faster(rows, work)
      ? cuda::batch_row_sums(rows, work, on.stream(), norm, slots)
      : cuda::few_row_sums(rows, work, on.stream(), norm, slots);
  return results;
}

Tensors few_row_lows(const Linear::Functions& linear, const at::Tensor& x, const Tensors& as,
                     const std::vector<double>& scales) {
  if (linear.forward != linear_cuda::forward) return {};
  std::vector<Products> sums;
  for (const at::Tensor& a : as) sums.push_back({{x, a}});
  return linear_cuda::can_be_few_rows(sums) ? linear_cuda::run_few_rows(sums, {}, scales)
                                            : Tensors();
}

}  // namespace heddle::ops
