#pragma once

#include <functional>
#include <vector>

#include "ops/registry.h"

namespace heddle::ops {

/// One parameter in an optimizer step. All tensors have its shape.
struct AdamwTensor {
  at::Tensor parameter;  ///< Updated in place.
  at::Tensor gradient;   ///< Any floating dtype.
  at::Tensor exp_avg;    ///< fp32 (fp64 for fp64), updated in place; or bf16 or uint8, see
                         ///< adamw_step.
  at::Tensor exp_avg_sq;
  at::Tensor master;  ///< fp32 copy of a bf16 parameter, updated in place and rounded into it;
                      ///< undefined if none.
  double weight_decay = 0;
  std::uint64_t rounding_key = 0;  ///< Key of stochastic rounding; differs between parameters.
  /// Scales of uint8 moments, fp32, an element for each eight_bit::kBlock; else undefined.
  at::Tensor exp_avg_scale = {}, exp_avg_sq_scale = {};
};

struct AdamwOptions {
  double lr = 0, beta1 = 0.9, beta2 = 0.999, eps = 1e-8;
  std::int64_t step = 1;           ///< From 1: the bias corrections.
  double gradient_multiplier = 1;  ///< Applied to every gradient first (clipping).
  /// fp64 [5] on the device, laid out as AdamwNow: replaces lr, step and gradient_multiplier, so
  /// that a step that was recorded can run with other numbers. Only where the kernel
  /// reads_device_numbers.
  at::Tensor on_device;
};

/// Parameters that step with the same numbers.
struct AdamwGroup {
  std::vector<AdamwTensor> tensors;
  AdamwOptions options;
};

/// Gives each group's gradient_multiplier, when all else is prepared: the host may have to wait for
/// it. NaN leaves a group as it is.
using LateMultipliers = std::function<std::vector<double>()>;

struct AdamwStep {
  static constexpr const char* kName = "adamw";
  using Dims = AnyDims;
  struct Functions {
    void (*step)(const std::vector<AdamwTensor>&, const AdamwOptions&);
    /// Steps tensors with bf16 moments. Null: the reference does it.
    void (*step_rounded)(const std::vector<AdamwTensor>&, const AdamwOptions&);
    bool reads_device_numbers = false;
    /// Steps tensors with uint8 moments. Null: the reference does it.
    void (*step_eight_bit)(const std::vector<AdamwTensor>&, const AdamwOptions&) = nullptr;
    /// Steps groups with fp32 moments in one launch, each with the bits of step(). Null: one group
    /// after another. Without `multipliers` the groups' own hold.
    void (*step_groups)(std::vector<AdamwGroup>, const LateMultipliers& multipliers) = nullptr;
  };
};

/// Decoupled weight decay ("Decoupled Weight Decay Regularization", arXiv 1711.05101), with
/// torch.optim.AdamW's order of operations: p *= 1 - lr wd; m, v; p -= lr / (1 - b1^t) * m /
/// (sqrt(v) / sqrt(1 - b2^t) + eps). Where a bf16 parameter has bf16 moments and no master, the
/// arithmetic is fp32 and all three are rounded stochastically, by the bits of rounding.h: up with
/// the probability that makes the mean exact. uint8 moments, beside bf16 or fp32 parameters without
/// master whose last dimension is a multiple of eight_bit::kBlock, hold the codes of eight_bit.h:
/// `exp_avg` of the first moment, `exp_avg_sq` of the square root of the second; they are rounded
/// in the same way, and a bf16 parameter too.
void adamw_step(const KernelTable& kernels, const std::vector<AdamwTensor>& tensors,
                const AdamwOptions& options);

/// adamw_step() of every group, with its bits, in as many launches as one group needs where the
/// kernel steps groups. `multipliers`, unless empty, replace those of the groups.
void adamw_steps(const KernelTable& kernels, std::vector<AdamwGroup> groups,
                 const LateMultipliers& multipliers = {});

struct SgdTensor {
  at::Tensor parameter, gradient;
  at::Tensor momentum_buffer;  ///< Undefined without momentum.
  at::Tensor master;
  double weight_decay = 0;  ///< Coupled (added to the gradient), as torch.optim.SGD.
};

/// p -= lr * (momentum * buffer + gradient * gradient_multiplier + wd p); the first step fills the
/// buffer.
void sgd_step(const std::vector<SgdTensor>& tensors, double lr, double momentum, bool first_step,
              double gradient_multiplier);

/// Square root of the sum of squares over all tensors, accumulated in fp64 (short runs in fp32 on a
/// GPU), as a host number (one synchronisation).
double gradient_norm(const std::vector<at::Tensor>& gradients);

/// gradient_norm() of every group, with its bits. On a GPU all share two launches, and the host
/// waits once.
std::vector<double> gradient_norms(const std::vector<std::vector<at::Tensor>>& groups);
/// Norms as above, queued now: the function that it returns waits for them.
std::function<std::vector<double>()> queued_gradient_norms(
    const std::vector<std::vector<at::Tensor>>& groups);

/// Tells of each tensor whether all its elements are zero; NaN is not. One synchronisation for all
/// of a dtype on a device.
std::vector<bool> are_zero(const std::vector<at::Tensor>& tensors);

/// The square of that norm, 0-d fp64 on the device, for which the host does not wait. bf16 and fp32
/// gradients on one GPU; at least one.
at::Tensor queued_square_sum(const std::vector<at::Tensor>& gradients);

}  // namespace heddle::ops
