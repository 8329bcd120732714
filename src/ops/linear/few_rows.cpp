#include "ops/linear/few_rows.h"

#include <ATen/Parallel.h>
#include <ATen/ops/empty.h>

#include <algorithm>

#include "ops/linear/cpu/vector/few_rows_kernel.h"

namespace heddle::ops {
namespace {

constexpr std::int64_t kMostRows = 32;
/// Weight elements from which on a second thread pays for being woken.
constexpr std::int64_t kGrainElements = 1 << 15;

}  // namespace

bool few_rows_fits(const at::Tensor& x, const at::Tensor& weight) {
  return x.is_cpu() && x.size(0) >= 1 && x.size(0) <= kMostRows && x.stride(1) == 1 &&
         weight.stride(1) == 1 && x.scalar_type() == weight.scalar_type() &&
         (x.scalar_type() == at::kFloat || x.scalar_type() == at::kBFloat16);
}

at::Tensor few_rows_product(const at::Tensor& x, const at::Tensor& weight) {
  TORCH_CHECK(few_rows_fits(x, weight) && x.size(1) == weight.size(1),
              "few_rows_product does not take ", x.sizes(), " and ", weight.sizes());
  at::Tensor y = at::empty({x.size(0), weight.size(0)}, x.options());
  const FewRows a{
      x.const_data_ptr(), weight.const_data_ptr(), y.mutable_data_ptr(), x.size(0),
      x.size(1),          weight.size(0),          x.stride(0),          weight.stride(0)};
  const FewRowsKernels kernels =
      HEDDLE_CPU_SELECT(few_rows_kernels)(x.scalar_type() == at::kBFloat16);
  at::Tensor lanes;
  if (a.rows >= kernels.packed_from) {
    const long groups = (a.rows + kPackedRows - 1) / kPackedRows;
    lanes = at::empty({groups, a.depth, kPackedRows}, x.options());
    kernels.pack(a, lanes.mutable_data_ptr<float>());
  }
  const float* const packed = lanes.defined() ? lanes.const_data_ptr<float>() : nullptr;
  at::parallel_for(
      0, a.columns, std::max<std::int64_t>(1, kGrainElements / a.depth),
      [&](std::int64_t begin, std::int64_t end) { kernels.multiply(a, packed, begin, end); });
  return y;
}

}  // namespace heddle::ops
