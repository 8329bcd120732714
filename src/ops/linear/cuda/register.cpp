// Joins the sums of products with ATen. Up to 16 rows, and 64 of the layers that few_row_layers()
// takes, have kernels of their own. Of more rows, one
// product alone is cuBLAS's, unless it is added to something; so are fewer rows than fill a tile of
// 256, and matrices that the bulk copies cannot read. Narrow products and low-rank changes of up to
// 511 rows go with the kernel of few rows, 16 at a time.
#include <ATen/ops/empty.h>
#include <fmt/format.h>

#include <algorithm>
#include <cstdint>

#include "ops/compute_type.h"
#include "ops/cuda/kernels.h"
#include "ops/cuda/tensor.h"
#include "ops/linear/cuda/few_row_tensors.h"
#include "ops/linear/cuda/low_rank.h"
#include "ops/linear/cuda/product_sum.h"
#include "ops/linear/cuda/product_sum_tensors.h"
#include "ops/linear/cuda/product_sum_tiles.h"
#include "ops/linear/kernels.h"

namespace heddle::ops::linear_cuda {
namespace {

bool is_one_product(const std::vector<Products>& sums) {
  return sums.size() == 1 && sums[0].size() == 1;
}

/// With tiles for all of the device our product is as fast as cuBLAS's, and x costs less than half
/// of what an addition after it takes; with few tiles cuBLAS's smaller ones gain more.
bool fits_onto(const at::Tensor& x, const Products& terms, std::int64_t columns) {
  return cuda::has_rows_of_16_bytes(x) && can_sum({terms}, {columns}) &&
         (terms.size() > 1 || cuda::product_sum_fills_device(x.size(0), columns));
}

bool fits(const std::vector<LowRankChange>& changes) {
  const std::int64_t rank = changes[0].low.size(1);
  return reads_once(rank) && changes.size() <= cuda::kMostLowRankGradients &&
         changes[0].low.size(0) >= kFewestRows &&
         std::all_of(changes.begin(), changes.end(), [&](const LowRankChange& change) {
           return change.low.size(1) == rank && cuda::has_rows_of_16_bytes(change.dy) &&
                  cuda::has_rows_of_16_bytes(change.b) && cuda::has_rows_of_16_bytes(change.low);
         });
}

std::optional<std::string> refuse_device(const Target&) {
  if (cuda::product_sums_available()) return std::nullopt;
  return "needs a device of compute capability 9.0 and a build for sm_90a";
}

}  // namespace

bool reads_once(std::int64_t rank) { return rank % 8 == 0 && rank <= cuda::kMostLowRank; }

std::vector<std::string> rank_warnings(const Linear::Dims& dims) {
  if (dims.adapter_rank == 0 || reads_once(dims.adapter_rank)) return {};
  return {fmt::format(
      "with adapter.rank {} the backward of the adapters reads each output gradient twice, where "
      "multiples of 8 up to {} have a kernel that reads it once",
      dims.adapter_rank, cuda::kMostLowRank)};
}

Tensors forward(const std::vector<Products>& sums) {
  if (are_few_rows(sums)) return run_few_rows(sums);
  if (are_some_rows(sums)) return run_some_rows(sums);
  std::vector<std::int64_t> columns;
  for (const Products& sum : sums) columns.push_back(sum[0].b.size(0));
  return can_sum(sums, columns) && !is_one_product(sums) ? sums_of(sums, columns, false)
                                                         : linear_reference::forward(sums);
}

at::Tensor forward_onto(const at::Tensor& x, const Products& terms) {
  const std::int64_t columns = terms[0].b.size(0);
  TORCH_CHECK(x.dim() == 2 && x.size(0) == terms[0].a.size(0) && x.size(1) == columns,
              "a product of ", terms[0].a.sizes(), " and ", terms[0].b.sizes(), " onto ",
              x.sizes());
  if (x.stride(1) == 1 && are_few_rows({terms})) return run_few_rows({terms}, x)[0];
  if (x.stride(1) == 1 && are_some_rows({terms})) return run_some_rows({terms}, x)[0];
  return fits_onto(x, terms, columns) ? sums_of({terms}, {columns}, false, x)[0]
                                      : linear_reference::forward_onto<forward>(x, terms);
}

at::Tensor backward(const Products& terms) {
  const std::vector<std::int64_t> columns = {terms[0].b.size(1)};
  return can_sum({terms}, columns) && terms.size() > 1 ? sums_of({terms}, columns, true)[0]
                                                       : linear_reference::backward(terms);
}

Linear::Functions::LowRankGradients low_rank_backward(const std::vector<LowRankChange>& changes) {
  if (!fits(changes)) return linear_reference::low_rank_backward(changes);
  const cuda::OnDevice on(changes[0].dy);
  const std::int64_t rows = changes[0].low.size(0), rank = changes[0].low.size(1);
  const auto count = static_cast<std::int64_t>(changes.size());
  Linear::Functions::LowRankGradients result;
  result.d_low = at::empty({rows, count * rank}, changes[0].low.options());
  std::vector<cuda::LowRankGradient> work;
  for (const auto& [dy, b, low] : changes) {
    TORCH_CHECK(
        dy.size(0) == rows && low.size(0) == rows && b.size(0) == dy.size(1) && b.size(1) == rank,
        "a low-rank change of ", dy.sizes(), " by ", low.sizes(), " and ", b.sizes());
    result.d_b.push_back(at::empty({dy.size(1), rank}, dy.options().dtype(at::kFloat)));
    at::Tensor d_low =
        result.d_low.narrow(1, (static_cast<std::int64_t>(work.size())) * rank, rank);
    work.push_back({dy.const_data_ptr(), dy.stride(0), dy.size(1), b.const_data_ptr(), b.stride(0),
                    low.const_data_ptr(), low.stride(0), d_low.mutable_data_ptr(), count * rank,
                    result.d_b.back().mutable_data_ptr<float>()});
  }
  const at::Tensor workspace =
      cuda::workspace_on(result.d_low, cuda::low_rank_workspace(rows, rank, work));
  cuda::low_rank_gradients(rows, rank, work, workspace.mutable_data_ptr<float>(), on.stream());
  return result;
}

}  // namespace heddle::ops::linear_cuda

namespace heddle::ops::cuda {

void add_linear(Registry& registry) {
  KernelInfo own = KernelInfo::cuda("cuda.sm90_or_cublas", {c10::ScalarType::BFloat16});
  own.refuse_device = linear_cuda::refuse_device;
  own.falls_back =
      "cuBLAS for more than 16 rows of one product alone (64 in generation), fewer than fill a "
      "tile "
      "of 256, or not starting on 16 bytes";
  registry.add<Linear>(own,
                       {.forward = linear_cuda::forward,
                        .forward_onto = linear_cuda::forward_onto,
                        .backward = linear_cuda::backward,
                        .low_rank_backward = linear_cuda::low_rank_backward,
                        .dropped_low = linear_cuda::dropped_low,
                        .dropped_gradient = linear_cuda::dropped_gradient,
                        .add_dropped = linear_cuda::add_dropped},
                       {.warnings = linear_cuda::rank_warnings});
  registry.add<Linear>(
      KernelInfo::cuda("cuda.cublas", reference_dtypes()),
      {linear_reference::forward, linear_reference::forward_onto<linear_reference::forward>,
       linear_reference::backward, linear_reference::low_rank_backward,
       linear_reference::dropped_low, linear_reference::dropped_gradient,
       linear_reference::add_dropped});
  add_fp8_linear(registry);
}

}  // namespace heddle::ops::cuda
