#include <ATen/TensorOperators.h>

#include <cmath>

#include "ops/npu/call.h"
#include "ops/npu/kernels.h"
#include "ops/optimizer_step/kernels.h"

namespace heddle::ops::adamw_npu {
namespace {

void step(const std::vector<AdamwTensor>& tensors, const AdamwOptions& options) {
  // The operator multiplies the powers of the step before by beta itself.
  const auto done = static_cast<double>(options.step - 1);
  for (const AdamwTensor& tensor : tensors) {
    const at::Tensor& p = tensor.master.defined() ? tensor.master : tensor.parameter;
    TORCH_CHECK(p.scalar_type() == tensor.exp_avg.scalar_type(),
                "npu.apply_adam_w: a parameter in ", p.scalar_type(), " with moments in ",
                tensor.exp_avg.scalar_type(), "; the operator takes one dtype");
    if (p.numel() == 0) continue;
    at::Tensor gradient = tensor.gradient.to(p.scalar_type());
    if (options.gradient_multiplier != 1) gradient = gradient * options.gradient_multiplier;
    npu::call("npu_apply_adam_w",
              {{"beta1_power", std::pow(options.beta1, done)},
               {"beta2_power", std::pow(options.beta2, done)},
               {"lr", options.lr},
               {"weight_decay", tensor.weight_decay},
               {"beta1", options.beta1},
               {"beta2", options.beta2},
               {"epsilon", options.eps},
               {"grad", gradient},
               {"amsgrad", false},
               {"maximize", false},
               {"out", std::vector<at::Tensor>{p, tensor.exp_avg, tensor.exp_avg_sq}}},
              "out");
    if (tensor.master.defined()) tensor.parameter.copy_(tensor.master);
  }
}

}  // namespace

}  // namespace heddle::ops::adamw_npu

namespace heddle::ops::npu {

void add_adamw(Registry& registry) {
  using namespace adamw_npu;
  registry.add<AdamwStep>(KernelInfo::ascend("npu.apply_adam_w", dtypes()), {step, nullptr});
}

}  // namespace heddle::ops::npu
