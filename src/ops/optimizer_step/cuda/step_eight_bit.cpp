// Joins the CUDA kernel of AdamW with 8-bit moments to tensors.
#include <vector>

#include "ops/cuda/tensor.h"
#include "ops/optimizer_step/cuda/adamw_eight_bit.h"
#include "ops/optimizer_step/cuda/kernel_arguments.h"
#include "ops/optimizer_step/kernels.h"

namespace heddle::ops::adamw_cuda {
namespace {

void run_eight_bit(const std::vector<AdamwTensor>& tensors, const AdamwOptions& options) {
  std::vector<at::Tensor> gradients;  // kept until the launches
  std::vector<cuda::AdamwEightBitTensor> table;
  for (const AdamwTensor& tensor : tensors) {
    if (tensor.parameter.numel() == 0) continue;
    const at::Tensor gradient = gradients.emplace_back(kernel_gradient(tensor));
    check_places({tensor.parameter, tensor.exp_avg, tensor.exp_avg_sq, gradient}, 16);
    cuda::AdamwEightBitTensor entry;
    entry.parameter = tensor.parameter.mutable_data_ptr();
    entry.gradient = gradient.const_data_ptr();
    entry.exp_avg = tensor.exp_avg.mutable_data_ptr<std::uint8_t>();
    entry.exp_avg_sq = tensor.exp_avg_sq.mutable_data_ptr<std::uint8_t>();
    entry.exp_avg_scale = tensor.exp_avg_scale.mutable_data_ptr<float>();
    entry.exp_avg_sq_scale = tensor.exp_avg_sq_scale.mutable_data_ptr<float>();
    entry.count = tensor.parameter.numel();
    entry.rounding_key = tensor.rounding_key;
    entry.weight_decay = tensor.weight_decay;
    entry.parameter_is_float = tensor.parameter.scalar_type() == at::kFloat;
    entry.gradient_is_float = gradient.scalar_type() == at::kFloat;
    table.push_back(entry);
  }
  if (table.empty()) return;
  const cuda::OnDevice on(gradients.front());
  cuda::adamw_eight_bit(table, scalars_of(options), on.stream());
}

}  // namespace

Step step_eight_bit() { return run_eight_bit; }

}  // namespace heddle::ops::adamw_cuda
