// Joins the CUDA kernel of the sum of squares to tensors.
#include <ATen/ops/empty.h>

#include <vector>

#include "ops/cuda/tensor.h"
#include "ops/optimizer_step/cuda/square_sum.h"
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

}  // namespace heddle::ops::optimizer_step_cuda
