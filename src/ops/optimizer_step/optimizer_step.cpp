#include "ops/optimizer_step/optimizer_step.h"

#include <ATen/TensorOperators.h>
#include <ATen/ops/_foreach_norm.h>
#include <ATen/ops/cat.h>
#include <ATen/ops/linalg_vector_norm.h>
#include <ATen/ops/stack.h>

#include <algorithm>
#include <cmath>
#include <limits>
#include <map>
#include <string>
#include <utility>

#include "ops/autograd.h"
#include "ops/builtin.h"
#include "ops/compute_type.h"
#include "ops/optimizer_step/eight_bit.h"
#include "ops/optimizer_step/kernels.h"

namespace heddle::ops {
namespace {

/// How the moments are kept: each its own step.
enum class State { kWide, kRounded, kEightBit };

State state_of(const AdamwTensor& tensor) {
  if (tensor.exp_avg.scalar_type() == at::kByte) return State::kEightBit;
  const bool is_rounded = tensor.parameter.scalar_type() == at::kBFloat16 &&
                          tensor.exp_avg.scalar_type() == at::kBFloat16 && !tensor.master.defined();
  return is_rounded ? State::kRounded : State::kWide;
}

void check_sizes(const AdamwTensor& tensor) {
  const auto sizes = tensor.parameter.sizes();
  TORCH_CHECK(tensor.gradient.sizes() == sizes && tensor.exp_avg.sizes() == sizes &&
                  tensor.exp_avg_sq.sizes() == sizes &&
                  (!tensor.master.defined() || tensor.master.sizes() == sizes),
              "adamw_step: gradient ", tensor.gradient.sizes(), ", exp_avg ",
              tensor.exp_avg.sizes(), ", exp_avg_sq ", tensor.exp_avg_sq.sizes(),
              " and master must have the parameter's shape ", sizes);
  for (const at::Tensor* x : {&tensor.parameter, &tensor.exp_avg, &tensor.exp_avg_sq,
                              &tensor.master, &tensor.exp_avg_scale, &tensor.exp_avg_sq_scale}) {
    TORCH_CHECK(!x->defined() || x->is_contiguous(), "adamw_step: a tensor of shape ", sizes,
                " is not contiguous");
  }
}

void check_step(const AdamwOptions& options) {
  TORCH_CHECK(options.step >= 1, "adamw_step: step ", options.step, " must count from 1");
}

void check_types(const AdamwTensor& tensor) {
  const c10::ScalarType type = tensor.parameter.scalar_type(), state = tensor.exp_avg.scalar_type();
  TORCH_CHECK(tensor.exp_avg_sq.scalar_type() == state, "adamw_step: moments of ", state, " and ",
              tensor.exp_avg_sq.scalar_type());
  if (state_of(tensor) == State::kRounded) return;
  if (state_of(tensor) == State::kEightBit) {
    const std::int64_t blocks = tensor.parameter.numel() / eight_bit::kBlock;
    const auto fits = [&](const at::Tensor& scale) {
      return scale.defined() && scale.scalar_type() == at::kFloat && scale.numel() == blocks;
    };
    TORCH_CHECK((type == at::kBFloat16 || type == at::kFloat) && !tensor.master.defined() &&
                    tensor.parameter.numel() % eight_bit::kBlock == 0 &&
                    fits(tensor.exp_avg_scale) && fits(tensor.exp_avg_sq_scale),
                "adamw_step: uint8 moments need a bfloat16 or float32 parameter without master, "
                "whole blocks of ",
                eight_bit::kBlock, " and a float32 scale for each; got ", type, " ",
                tensor.parameter.sizes());
    return;
  }
  TORCH_CHECK(state == compute_type(tensor.parameter) &&
                  (tensor.master.defined() ? tensor.master.scalar_type() == state : type == state),
              "adamw_step: a ", type, " parameter needs ", compute_type(tensor.parameter),
              " moments", type == state ? "" : " and master");
}

}  // namespace

void adamw_step(const KernelTable& kernels, const std::vector<AdamwTensor>& tensors,
                const AdamwOptions& options) {
  check_step(options);
  const NoGradient guard;
  const AdamwStep::Functions& functions = kernels.get<AdamwStep>();
  TORCH_CHECK(!options.on_device.defined() || functions.reads_device_numbers,
              "adamw_step: the chosen kernel takes its numbers from the host");
  std::map<State, std::vector<AdamwTensor>> by_state;
  for (const AdamwTensor& tensor : tensors) {
    check_sizes(tensor);
    check_types(tensor);
    by_state[state_of(tensor)].push_back(tensor);
  }
  for (const auto& [state, members] : by_state) {
    auto step = functions.step;
    if (state == State::kRounded)
      step = functions.step_rounded ? functions.step_rounded : adamw_reference::step_rounded;
    if (state == State::kEightBit)
      step = functions.step_eight_bit ? functions.step_eight_bit : adamw_reference::step_eight_bit;
    step(members, options);
  }
}

namespace {

/// Gives the groups their multipliers, and takes out those that stay as they are.
void settle(std::vector<AdamwGroup>& groups, const LateMultipliers& multipliers) {
  if (!multipliers) return;
  const std::vector<double> found = multipliers();
  for (std::size_t i = 0; i < groups.size(); ++i)
    groups[i].options.gradient_multiplier = found.at(i);
  std::erase_if(groups, [](const AdamwGroup& group) {
    return std::isnan(group.options.gradient_multiplier);
  });
}

}  // namespace

void adamw_steps(const KernelTable& kernels, std::vector<AdamwGroup> groups,
                 const LateMultipliers& multipliers) {
  const AdamwStep::Functions& functions = kernels.get<AdamwStep>();
  const auto is_wide = [](const AdamwTensor& tensor) { return state_of(tensor) == State::kWide; };
  const bool shares_launch =
      functions.step_groups != nullptr && groups.size() > 1 &&
      std::all_of(groups.begin(), groups.end(), [&](const AdamwGroup& group) {
        return !group.options.on_device.defined() &&
               std::all_of(group.tensors.begin(), group.tensors.end(), is_wide);
      });
  if (!shares_launch) {
    settle(groups, multipliers);
    for (const AdamwGroup& group : groups) adamw_step(kernels, group.tensors, group.options);
    return;
  }
  const NoGradient guard;
  for (const AdamwGroup& group : groups) {
    check_step(group.options);
    for (const AdamwTensor& tensor : group.tensors) {
      check_sizes(tensor);
      check_types(tensor);
    }
  }
  functions.step_groups(std::move(groups), multipliers);
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

std::vector<double> gradient_norms(const std::vector<std::vector<at::Tensor>>& groups) {
  return queued_gradient_norms(groups)();
}

std::function<std::vector<double>()> queued_gradient_norms(
    const std::vector<std::vector<at::Tensor>>& groups) {
  const NoGradient guard;
  const bool shares_launches =
      std::all_of(groups.begin(), groups.end(), [](const std::vector<at::Tensor>& group) {
        return std::all_of(group.begin(), group.end(), optimizer_step_cuda::square_sum_fits);
      });
  if (!shares_launches) {
    std::vector<double> norms;
    for (const std::vector<at::Tensor>& group : groups) norms.push_back(gradient_norm(group));
    return [norms = std::move(norms)] { return norms; };
  }
  return [count = groups.size(), sums = optimizer_step_cuda::square_sums(groups)] {
    std::vector<double> norms(count);
    if (!sums.defined()) return norms;
    const at::Tensor host = sums.cpu();
    for (std::size_t i = 0; i < count; ++i) norms[i] = std::sqrt(host.const_data_ptr<double>()[i]);
    return norms;
  };
}

std::vector<bool> are_zero(const std::vector<at::Tensor>& tensors) {
  const NoGradient guard;
  // The largest magnitude: squares of the smallest numbers would be zero.
  constexpr double kOrder = std::numeric_limits<double>::infinity();
  struct Alike {
    std::vector<std::size_t> places;
    std::vector<at::Tensor> tensors;
  };
  std::map<std::pair<std::string, c10::ScalarType>, Alike> groups;
  std::vector<bool> zero(tensors.size(), true);
  for (std::size_t i = 0; i < tensors.size(); ++i) {
    if (tensors[i].numel() == 0) continue;
    Alike& group = groups[{tensors[i].device().str(), tensors[i].scalar_type()}];
    group.places.push_back(i);
    group.tensors.push_back(tensors[i]);
  }
  for (const auto& [kind, group] : groups) {
    std::vector<at::Tensor> norms;
    if (group.tensors.front().is_cuda()) {
      norms = at::_foreach_norm(group.tensors, kOrder);
    } else {
      for (const at::Tensor& tensor : group.tensors)
        norms.push_back(at::linalg_vector_norm(tensor, kOrder));
    }
    const at::Tensor host = at::stack(norms).cpu().to(at::kDouble);
    const auto* const largest = host.const_data_ptr<double>();
    for (std::size_t i = 0; i < group.places.size(); ++i) zero[group.places[i]] = largest[i] == 0;
  }
  return zero;
}

at::Tensor queued_square_sum(const std::vector<at::Tensor>& gradients) {
  const NoGradient guard;
  for (const at::Tensor& gradient : gradients) {
    TORCH_CHECK(optimizer_step_cuda::square_sum_fits(gradient), "queued_square_sum: a gradient is ",
                gradient.scalar_type(), " ", gradient.sizes(), " on ", gradient.device());
  }
  return optimizer_step_cuda::square_sum(gradients);
}

void register_optimizer_step(Registry& registry) {
  registry.add<AdamwStep>(KernelInfo::cpu("cpu"), {optimizer_step_cpu::adamw, nullptr});
  registry.add<AdamwStep>(KernelInfo::reference(),
                          {adamw_reference::step, adamw_reference::step_rounded});
}

}  // namespace heddle::ops
