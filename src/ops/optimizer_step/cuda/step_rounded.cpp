// Joins the CUDA kernel of AdamW with bf16 state to tensors.
#include <c10/core/DeviceGuard.h>
#include <c10/cuda/CUDAStream.h>

#include <vector>

#include "ops/optimizer_step/cuda/adamw_rounded.h"
#include "ops/optimizer_step/cuda/scalars_of.h"
#include "ops/optimizer_step/kernels.h"

namespace heddle::ops::adamw_cuda {
namespace {

bool is_aligned(const at::Tensor& x) {
  return reinterpret_cast<std::uintptr_t>(x.const_data_ptr()) % 16 == 0;
}

void run(const std::vector<AdamwTensor>& tensors, const AdamwOptions& options) {
  const cuda::AdamwScalars scalars = scalars_of(options);
  std::vector<at::Tensor> gradients;  // kept until the launches
  std::vector<cuda::AdamwRoundedTensor> table;
  for (const AdamwTensor& tensor : tensors) {
    if (tensor.parameter.numel() == 0) continue;
    TORCH_CHECK(tensor.parameter.is_cuda(), "cuda.fused: a parameter is on ",
                tensor.parameter.device());
    at::Tensor gradient = tensor.gradient.contiguous();
    if (gradient.scalar_type() != at::kFloat && gradient.scalar_type() != at::kBFloat16)
      gradient = gradient.to(at::kFloat);
    at::Tensor p = tensor.parameter, m = tensor.exp_avg, v = tensor.exp_avg_sq;
    for (const at::Tensor* x : {&p, &m, &v, &gradient}) {
      TORCH_CHECK(is_aligned(*x), "cuda.fused: a tensor of ", x->sizes(),
                  " does not start on 16 bytes");
    }
    gradients.push_back(gradient);
    table.push_back({p.mutable_data_ptr(), gradient.const_data_ptr(), m.mutable_data_ptr(),
                     v.mutable_data_ptr(), p.numel(), tensor.rounding_key, tensor.weight_decay,
                     gradient.scalar_type() == at::kFloat});
  }
  if (table.empty()) return;
  const c10::DeviceGuard guard(gradients[0].device());
  cuda::adamw_rounded(table, scalars,
                      c10::cuda::getCurrentCUDAStream(gradients[0].device().index()).stream());
}

}  // namespace

Step step_rounded() { return run; }

}  // namespace heddle::ops::adamw_cuda
