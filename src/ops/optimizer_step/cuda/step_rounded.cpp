// Joins the CUDA kernel of AdamW with bf16 state to tensors.
#include <vector>

#include "ops/cuda/tensor.h"
#include "ops/optimizer_step/cuda/adamw_rounded.h"
#include "ops/optimizer_step/cuda/kernel_arguments.h"
#include "ops/optimizer_step/kernels.h"

namespace heddle::ops::adamw_cuda {
namespace {

void run_rounded(const std::vector<AdamwTensor>& tensors, const AdamwOptions& options) {
  std::vector<at::Tensor> gradients;  // kept until the launches
  std::vector<cuda::AdamwRoundedTensor> table;
  for (const AdamwTensor& tensor : tensors) {
    if (tensor.parameter.numel() == 0) continue;
    const at::Tensor gradient = gradients.emplace_back(kernel_gradient(tensor));
    const at::Tensor &p = tensor.parameter, &m = tensor.exp_avg, &v = tensor.exp_avg_sq;
    check_places({p, m, v, gradient}, 1);
    table.push_back({p.mutable_data_ptr(), gradient.const_data_ptr(), m.mutable_data_ptr(),
                     v.mutable_data_ptr(), p.numel(), tensor.rounding_key, tensor.weight_decay,
                     gradient.scalar_type() == at::kFloat});
  }
  if (table.empty()) return;
  const cuda::OnDevice on(gradients.front());
  cuda::adamw_rounded(table, scalars_of(options), on.stream());
}

}  // namespace

Step step_rounded() { return run_rounded; }

}  // namespace heddle::ops::adamw_cuda
