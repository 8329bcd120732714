// Joins the CUDA kernel of the sum of squares to tensors.
#include <ATen/ops/empty.h>

#include <vector>

#include "ops/cuda/tensor.h"
#include "ops/optimizer_step/cuda/square_sum.h"
#include "ops/optimizer_step/cuda/stored_tables.h"
#include "ops/optimizer_step/kernels.h"

namespace heddle::ops::optimizer_step_cuda {

bool square_sum_fits(const at::Tensor& x) {
  return x.is_cuda() && (x.scalar_type() == at::kFloat || x.scalar_type() == at::kBFloat16) &&
         x.is_contiguous() && reinterpret_cast<std::uintptr_t>(x.const_data_ptr()) % 16 == 0;
}

at::Tensor square_sum(const std::vector<at::Tensor>& tensors) {
  const cuda::OnDevice on(tensors.at(0));
  std::vector<cuda::SquareSumEntry> entries;
  for (const at::Tensor& x : tensors)
    entries.push_back({x.const_data_ptr(), x.numel(), cuda::element_of(x)});
  const auto options = tensors[0].options().dtype(at::kDouble);
  const at::Tensor workspace = at::empty({cuda::square_sum_workspace(entries)}, options);
  const at::Tensor total = at::empty({}, options);
  cuda::square_sum(entries, workspace.mutable_data_ptr<double>(), total.mutable_data_ptr<double>(),
                   on.stream());
  return total;
}

at::Tensor square_sums(const std::vector<std::vector<at::Tensor>>& groups) {
  cuda::SquareSumGroups tables;
  const at::Tensor* first = nullptr;
  for (const std::vector<at::Tensor>& group : groups) {
    for (const at::Tensor& x : group) {
      if (first == nullptr) first = &x;
      TORCH_CHECK(x.device() == first->device(), "square_sums: gradients on ", x.device(), " and ",
                  first->device());
      tables.add({x.const_data_ptr(), x.numel(), cuda::element_of(x)});
    }
    tables.end_group();
  }
  if (first == nullptr) return {};
  const cuda::OnDevice on(*first);
  const cuda::StoredTables stored(
      first->device(),
      {cuda::bytes_of(tables.entries), cuda::bytes_of(tables.first_block),
       cuda::bytes_of(tables.tensor_of_block), cuda::bytes_of(tables.group_begin)});
  const auto blocks = static_cast<int>(tables.tensor_of_block.size());
  const auto options = first->options().dtype(at::kDouble);
  const at::Tensor workspace = at::empty({blocks}, options);
  const at::Tensor totals = at::empty({static_cast<std::int64_t>(groups.size())}, options);
  cuda::square_sums({stored.at<cuda::SquareSumEntry>(0), stored.at<int>(1), stored.at<int>(2),
                     stored.at<int>(3), blocks, static_cast<int>(groups.size())},
                    workspace.mutable_data_ptr<double>(), totals.mutable_data_ptr<double>(),
                    on.stream());
  return totals;
}

}  // namespace heddle::ops::optimizer_step_cuda
