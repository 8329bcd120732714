// libtorch's fused AdamW on CUDA, for what our own kernel does not take.
#include <ATen/TensorOperators.h>
#include <ATen/ops/_foreach_copy.h>
#include <ATen/ops/_fused_adamw.h>
#include <ATen/ops/full.h>

#include <map>
#include <tuple>

#include "ops/compute_type.h"
#include "ops/cuda/kernels.h"
#include "ops/optimizer_step/kernels.h"

namespace heddle::ops::adamw_cuda {
namespace {

/// Gradients are converted or scaled into temporaries; this many elements of them at a time.
constexpr std::int64_t kGroupElements = std::int64_t{64} << 20;

void step_group(const std::vector<const AdamwTensor*>& group, const AdamwOptions& options) {
  std::vector<at::Tensor> parameters, gradients, exp_avgs, exp_avg_sqs, masters, rounded;
  for (const AdamwTensor* tensor : group) {
    const at::Tensor& p = tensor->master.defined() ? tensor->master : tensor->parameter;
    at::Tensor g = tensor->gradient.to(p.scalar_type());
    if (options.gradient_multiplier != 1) g = g * options.gradient_multiplier;
    parameters.push_back(p);
    gradients.push_back(g);
    exp_avgs.push_back(tensor->exp_avg);
    exp_avg_sqs.push_back(tensor->exp_avg_sq);
    if (tensor->master.defined()) {
      masters.push_back(tensor->master);
      rounded.push_back(tensor->parameter);
    }
  }
  const at::Tensor count =
      at::full({}, static_cast<double>(options.step), parameters[0].options().dtype(at::kFloat));
  const std::vector<at::Tensor> counts(parameters.size(), count);
  at::_fused_adamw_(parameters, gradients, exp_avgs, exp_avg_sqs, /*max_exp_avg_sqs=*/{}, counts,
                    options.lr, options.beta1, options.beta2, group[0]->weight_decay, options.eps,
                    /*amsgrad=*/false, /*maximize=*/false);
  if (!masters.empty()) at::_foreach_copy_(rounded, masters);
}

}  // namespace

void step_by_libtorch(const std::vector<AdamwTensor>& tensors, const AdamwOptions& options) {
  // The fused kernel takes one weight decay and one dtype for all its tensors.
  std::map<std::tuple<double, c10::ScalarType, bool>, std::vector<const AdamwTensor*>> groups;
  for (const AdamwTensor& tensor : tensors) {
    TORCH_CHECK(tensor.parameter.is_cuda(), "cuda.fused: a parameter is on ",
                tensor.parameter.device());
    if (tensor.parameter.numel() == 0) continue;
    groups[{tensor.weight_decay, tensor.exp_avg.scalar_type(), tensor.master.defined()}].push_back(
        &tensor);
  }
  for (const auto& [key, members] : groups) {
    std::vector<const AdamwTensor*> part;
    std::int64_t elements = 0;
    for (const AdamwTensor* tensor : members) {
      if (!part.empty() && elements + tensor->parameter.numel() > kGroupElements) {
        step_group(part, options);
        part.clear();
        elements = 0;
      }
      part.push_back(tensor);
      elements += tensor->parameter.numel();
    }
    if (!part.empty()) step_group(part, options);
  }
}

}  // namespace heddle::ops::adamw_cuda

namespace heddle::ops::cuda {

void add_adamw(Registry& registry) {
  using namespace adamw_cuda;
  KernelInfo info = KernelInfo::cuda("cuda.fused", reference_dtypes());
  info.falls_back =
      "libtorch's fused AdamW for fp64 moments, gradients in another type than fp32 and bf16, and "
      "tensors that do not start on 16 bytes";
  registry.add<AdamwStep>(info, {step_wide(), step_rounded(), /*reads_device_numbers=*/true,
                                 step_eight_bit(), step_groups});
}

}  // namespace heddle::ops::cuda
