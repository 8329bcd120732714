#include "ops/optimizer_step/optimizer_step.h"

#include <ATen/TensorOperators.h>
#include <ATen/ops/_foreach_norm.h>
#include <ATen/ops/cat.h>
#include <ATen/ops/linalg_vector_norm.h>
#include <ATen/ops/stack.h>

#include <cmath>
#include <map>

#include "ops/autograd.h"
#include "ops/builtin.h"
#include "ops/compute_type.h"
#include "ops/optimizer_step/kernels.h"

namespace heddle::ops {
namespace {

bool is_rounded(const AdamwTensor& tensor) {
  return tensor.parameter.scalar_type() == at::kBFloat16 &&
         tensor.exp_avg.scalar_type() == at::kBFloat16 && !tensor.master.defined();
}

}  // namespace

void adamw_step(const KernelTable& kernels, const std::vector<AdamwTensor>& tensors,
                const AdamwOptions& options) {
  TORCH_CHECK(options.step >= 1, "adamw_step: step ", options.step, " must count from 1");
  for (const AdamwTensor& tensor : tensors) {
    const auto sizes = tensor.parameter.sizes();
    TORCH_CHECK(tensor.gradient.sizes() == sizes && tensor.exp_avg.sizes() == sizes &&
                    tensor.exp_avg_sq.sizes() == sizes &&
                    (!tensor.master.defined() || tensor.master.sizes() == sizes),
                "adamw_step: gradient ", tensor.gradient.sizes(), ", exp_avg ",
                tensor.exp_avg.sizes(), ", exp_avg_sq ", tensor.exp_avg_sq.sizes(),
                " and master must have the parameter's shape ", sizes);
    const c10::ScalarType state = tensor.exp_avg.scalar_type();
    const bool rounded = is_rounded(tensor);
    TORCH_CHECK((rounded || state == compute_type(tensor.parameter)) &&
                    tensor.exp_avg_sq.scalar_type() == state &&
                    (tensor.master.defined() ? tensor.master.scalar_type() == state
                                             : tensor.parameter.scalar_type() == state),
                "adamw_step: a ", tensor.parameter.scalar_type(), " parameter needs ",
                compute_type(tensor.parameter), " moments",
                tensor.parameter.scalar_type() == state ? "" : " and master");
    TORCH_CHECK(tensor.parameter.is_contiguous() && tensor.exp_avg.is_contiguous() &&
                    tensor.exp_avg_sq.is_contiguous() &&
                    (!tensor.master.defined() || tensor.master.is_contiguous()),
                "adamw_step: a tensor of shape ", sizes, " is not contiguous");
  }
  const NoGradient guard;
  const AdamwStep::Functions& functions = kernels.get<AdamwStep>();
  TORCH_CHECK(!options.on_device.defined() || functions.reads_device_numbers,
              "adamw_step: the chosen kernel takes its numbers from the host");
  std::vector<AdamwTensor> wide, rounded;
  for (const AdamwTensor& tensor : tensors) (is_rounded(tensor) ? rounded : wide).push_back(tensor);
  if (!wide.empty()) functions.step(wide, options);
  if (rounded.empty()) return;
  (functions.step_rounded != nullptr ? functions.step_rounded : adamw_reference::step_rounded)(
      rounded, options);
}

void sgd_step(const std::vector<SgdTensor>& tensors, double lr, double momentum, bool first_step,
              double gradient_multiplier) {
  const NoGradient guard;
  for (const SgdTensor& tensor : tensors) {
    at::Tensor p = tensor.master.defined() ? tensor.master : tensor.parameter;
    TORCH_CHECK(tensor.gradient.sizes() == p.sizes() && tensor.parameter.sizes() == p.sizes() &&
                    (momentum == 0 || (tensor.momentum_buffer.defined() &&
                                       tensor.momentum_buffer.sizes() == p.sizes())),
                "sgd_step: gradient ", tensor.gradient.sizes(),
                " and momentum buffer must have the parameter's shape ", p.sizes());
    at::Tensor g = tensor.gradient.to(compute_type(p)) * gradient_multiplier;
    if (tensor.weight_decay != 0) g.add_(p, tensor.weight_decay);
    if (momentum != 0) {
      at::Tensor buffer = tensor.momentum_buffer;
      if (first_step) {
        buffer.copy_(g);
      } else {
        buffer.mul_(momentum).add_(g);
      }
      g = buffer;
    }
    p.add_(g, -lr);
    if (tensor.master.defined()) tensor.parameter.copy_(p);
  }
}

namespace {

/// The norm in float32 from the norms of short rows: one float32 sum of a million squares is wrong
/// by 1e-4.
at::Tensor norm_by_rows(const at::Tensor& tensor) {
  constexpr std::int64_t kRow = 2048;
  const at::Tensor flat = tensor.reshape({-1});
  const std::int64_t whole = flat.numel() / kRow * kRow, rest = flat.numel() - whole;
  const auto norm = [](const at::Tensor& x) {
    return at::linalg_vector_norm(x, 2, {-1}, /*keepdim=*/false, at::kFloat);
  };
  at::Tensor rows = norm(flat.narrow(0, 0, whole).view({-1, kRow}));
  if (rest > 0) rows = at::cat({rows, norm(flat.narrow(0, whole, rest).unsqueeze(0))});
  return norm(rows);
}

}  // namespace

double gradient_norm(const std::vector<at::Tensor>& gradients) {
  const NoGradient guard;
  // Tensors of one dtype share libtorch's launches.
  std::map<c10::ScalarType, std::vector<at::Tensor>> on_device;
  std::vector<at::Tensor> on_cpu, on_cuda;
  for (const at::Tensor& gradient : gradients) {
    if (!gradient.defined() || gradient.numel() == 0) continue;
    if (gradient.is_cpu() && gradient.scalar_type() != at::kHalf) {
      on_cpu.push_back(gradient);
      continue;
    }
    if (optimizer_step_cuda::square_sum_fits(gradient)) {
      on_cuda.push_back(gradient);
      continue;
    }
    on_device[gradient.scalar_type()].push_back(gradient);
  }
  double sum = optimizer_step_cpu::square_sum(on_cpu);
  if (!on_cuda.empty()) sum += optimizer_step_cuda::square_sum(on_cuda).item().toDouble();
  if (on_device.empty()) return std::sqrt(sum);
  std::vector<at::Tensor> norms;
  for (const auto& [dtype, tensors] : on_device) {
    // Ascend has no float64.
    if (tensors.front().is_cuda() || dtype == at::kDouble) {
      for (const at::Tensor& norm : at::_foreach_norm(tensors, 2, at::kDouble))
        norms.push_back(norm);
    } else {
      for (const at::Tensor& tensor : tensors) norms.push_back(norm_by_rows(tensor));
    }
  }
  const at::Tensor host = at::stack(norms).cpu().to(at::kDouble);
  const double norm = at::linalg_vector_norm(host).item<double>();
  return std::sqrt(norm * norm + sum);
}

at::Tensor queued_gradient_norm(const std::vector<at::Tensor>& gradients) {
  const NoGradient guard;
  for (const at::Tensor& gradient : gradients) {
    TORCH_CHECK(optimizer_step_cuda::square_sum_fits(gradient),
                "queued_gradient_norm: a gradient is ", gradient.scalar_type(), " ",
                gradient.sizes(), " on ", gradient.device());
  }
  return optimizer_step_cuda::square_sum(gradients).sqrt_();
}

void register_optimizer_step(Registry& registry) {
  adamw_cuda::add(registry);
  adamw_npu::add(registry);
  registry.add<AdamwStep>({.op = "",
                           .name = "cpu",
                           .device = c10::DeviceType::CPU,
                           .dtypes = cpu_kernel_dtypes(),
                           .is_reference = false,
                           .refuse = {},
                           .on_chip_bytes = {}},
                          {optimizer_step_cpu::adamw, nullptr});
  registry.add<AdamwStep>({.op = "",
                           .name = "reference",
                           .device = {},
                           .dtypes = reference_dtypes(),
                           .is_reference = true,
                           .refuse = {},
                           .on_chip_bytes = {}},
                          {adamw_reference::step, adamw_reference::step_rounded});
}

}  // namespace heddle::ops
