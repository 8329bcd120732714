#include "ops/linear/cuda/fp8_tensors.h"

#include <ATen/ops/_scaled_mm.h>
#include <ATen/ops/empty.h>

#include <optional>
#include <utility>

#include "ops/cuda/tensor.h"
#include "ops/linear/cuda/fp8_rows.h"

namespace heddle::ops::linear_fp8 {

using cuda::EightBitRows;

namespace {

EightBitRows empty_rows(const at::Tensor& like, std::int64_t rows, std::int64_t columns) {
  return {at::empty({rows, columns}, like.options().dtype(at::kFloat8_e4m3fn)),
          at::empty({rows, 1}, like.options().dtype(at::kFloat))};
}

}  // namespace

EightBitRows rows_of(const at::Tensor& x) {
  if (std::optional<EightBitRows> made = cuda::take_beside(x)) return *std::move(made);
  const cuda::OnDevice on(x);
  EightBitRows result = empty_rows(x, x.size(0), x.size(1));
  cuda::fp8_rows(x.const_data_ptr(), x.size(0), x.size(1), x.stride(0),
                 result.values.mutable_data_ptr(), result.scales.mutable_data_ptr<float>(),
                 on.stream());
  return result;
}

EightBitRows columns_of(const at::Tensor& x) {
  const cuda::OnDevice on(x);
  EightBitRows result = empty_rows(x, x.size(1), x.size(0));
  const at::Tensor largest = cuda::workspace_on(x, x.size(1));
  cuda::fp8_columns(x.const_data_ptr(), x.size(0), x.size(1), x.stride(0),
                    result.values.mutable_data_ptr(), result.scales.mutable_data_ptr<float>(),
                    largest.mutable_data_ptr<float>(), on.stream());
  return result;
}

at::Tensor product_of(const EightBitRows& a, const EightBitRows& b) {
  at::Tensor y =
      at::empty({a.values.size(0), b.values.size(0)}, a.values.options().dtype(at::kBFloat16));
  product_into(y, a, b);
  return y;
}

void product_into(at::Tensor& y, const EightBitRows& a, const EightBitRows& b) {
  at::_scaled_mm_out(y, a.values, b.values.t(), a.scales, b.scales.t(), /*bias=*/{},
                     /*scale_result=*/{}, at::kBFloat16, /*use_fast_accum=*/true);
}

}  // namespace heddle::ops::linear_fp8
