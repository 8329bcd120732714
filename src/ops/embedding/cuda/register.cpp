// Joins the sums of rows with ATen.
#include <ATen/ops/sort.h>

#include "ops/cuda/kernels.h"
#include "ops/cuda/tensor.h"
#include "ops/embedding/cuda/row_sums.h"
#include "ops/embedding/kernels.h"

namespace heddle::ops::embedding_cuda {
namespace {

void backward(const at::Tensor& tokens, const at::Tensor& grad_y, at::Tensor& table_gradient) {
  const cuda::OnDevice on(grad_y);
  const at::Tensor rows = cuda::with_unit_stride(grad_y);
  TORCH_CHECK(tokens.scalar_type() == at::kLong && tokens.dim() == 1 && rows.dim() == 2 &&
                  rows.size(0) == tokens.size(0) && table_gradient.is_contiguous() &&
                  table_gradient.size(1) == rows.size(1),
              "the gradient ", rows.sizes(), " of rows of a table ", table_gradient.sizes());
  // A stable sort on the device: neither it nor the sums make the host wait.
  const auto [numbers, order] = at::sort(tokens, /*stable=*/true, /*dim=*/0, /*descending=*/false);
  const cuda::RowSumsShape shape{rows.size(0), rows.size(1), cuda::element_of(rows),
                                 cuda::element_of(table_gradient)};
  const at::Tensor workspace = cuda::workspace_on(rows, cuda::row_sums_workspace(shape));
  cuda::row_sums(shape, numbers.const_data_ptr<std::int64_t>(),
                 order.const_data_ptr<std::int64_t>(), rows.const_data_ptr(), rows.stride(0),
                 table_gradient.mutable_data_ptr(), workspace.mutable_data_ptr<float>(),
                 on.stream());
}

}  // namespace

}  // namespace heddle::ops::embedding_cuda

namespace heddle::ops::cuda {

void add_embedding(Registry& registry) {
  using namespace embedding_cuda;
  registry.add<Embedding>(KernelInfo::cuda("cuda.sorted"), {backward});
}

}  // namespace heddle::ops::cuda
