#include "ops/linear/cuda/product_sum_tensors.h"

#include <ATen/ops/empty.h>

#include <algorithm>
#include <utility>

#include "ops/cuda/tensor.h"
#include "ops/linear/cuda/few_row_tensors.h"

namespace heddle::ops::linear_cuda {

bool can_sum(const std::vector<Products>& sums, const std::vector<std::int64_t>& columns) {
  std::size_t terms = 0;
  for (const Products& sum : sums) {
    terms += sum.size();
    for (const Product& product : sum) {
      if (!cuda::has_rows_of_16_bytes(product.a) || !cuda::has_rows_of_16_bytes(product.b))
        return false;
    }
  }
  const std::int64_t rows = sums[0][0].a.size(0);
  return terms <= cuda::kMostProductTerms && sums.size() <= cuda::kMostProductSums &&
         rows >= kFewestRows && std::all_of(columns.begin(), columns.end(), [](std::int64_t n) {
           return n % 8 == 0 || n < 8;
         });
}

at::Tensor result_like(const at::Tensor& a, std::int64_t columns) {
  at::Tensor y = at::empty({a.size(0), std::max<std::int64_t>(columns, 8)}, a.options());
  return columns < 8 ? y.narrow(1, 0, columns) : y;
}

Tensors sums_of(const std::vector<Products>& sums, const std::vector<std::int64_t>& columns,
                bool b_has_depth_first, const at::Tensor& start, const NarrowTerm& narrow) {
  const at::Tensor& first = sums[0][0].a;
  const cuda::OnDevice on(first);
  Tensors results;
  std::vector<cuda::ProductSum> work;
  for (std::size_t i = 0; i < sums.size(); ++i) {
    const at::Tensor y = result_like(first, columns[i]);
    cuda::ProductSum sum;
    sum.y = y.mutable_data_ptr();
    sum.y_stride = y.stride(0);
    sum.columns = columns[i];
    if (start.defined()) {
      sum.start = start.const_data_ptr();
      sum.start_stride = start.stride(0);
    }
    for (const Product& product : sums[i]) {
      const at::Tensor &a = product.a, &b = product.b;
      TORCH_CHECK(a.size(0) == first.size(0) && a.size(1) == b.size(b_has_depth_first ? 0 : 1),
                  "a product of ", a.sizes(), " and ", b.sizes());
      sum.terms.push_back(
          {a.const_data_ptr(), a.stride(0), b.const_data_ptr(), b.stride(0), a.size(1)});
      if (narrow) narrow(product, sum.terms.back());
    }
    work.push_back(std::move(sum));
    results.push_back(y);
  }
  cuda::product_sums(first.size(0), work, b_has_depth_first, on.stream());
  return results;
}

}  // namespace heddle::ops::linear_cuda
