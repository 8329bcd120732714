#pragma once

#include "ops/optimizer_step/optimizer_step.h"

namespace heddle::ops::adamw_reference {

void step(const std::vector<AdamwTensor>& tensors, const AdamwOptions& options);
void step_rounded(const std::vector<AdamwTensor>& tensors, const AdamwOptions& options);
void step_eight_bit(const std::vector<AdamwTensor>& tensors, const AdamwOptions& options);

}  // namespace heddle::ops::adamw_reference

namespace heddle::ops::adamw_cuda {

/// libtorch's fused AdamW: tensors of any dtype, gradients converted and scaled beforehand.
void step_by_libtorch(const std::vector<AdamwTensor>& tensors, const AdamwOptions& options);
using Step = void (*)(const std::vector<AdamwTensor>&, const AdamwOptions&);
/// Our kernel for fp32 moments, which leaves to libtorch's what it does not take.
Step step_wide();
/// The kernel for bf16 moments.
Step step_rounded();
/// The kernel for uint8 moments.
Step step_eight_bit();
/// One launch of the kernel for fp32 moments over all groups.
void step_groups(std::vector<AdamwGroup> groups, const LateMultipliers& multipliers);

}  // namespace heddle::ops::adamw_cuda

namespace heddle::ops::optimizer_step_cuda {

/// Whether square_sum takes the tensor; in a build without CUDA it takes none.
bool square_sum_fits(const at::Tensor& x);
/// Sum of squares over at least one tensor, 0-d fp64 on their device: the host does not wait.
at::Tensor square_sum(const std::vector<at::Tensor>& tensors);
/// Sums of squares of groups [groups], fp64 on their device; a group without tensors has 0.
/// Undefined where no group has any.
at::Tensor square_sums(const std::vector<std::vector<at::Tensor>>& groups);

}  // namespace heddle::ops::optimizer_step_cuda

namespace heddle::ops::optimizer_step_cpu {

void adamw(const std::vector<AdamwTensor>& tensors, const AdamwOptions& options);
/// Sum of squares over all (defined, CPU) tensors, the same bits for any number of threads.
double square_sum(const std::vector<at::Tensor>& tensors);

}  // namespace heddle::ops::optimizer_step_cpu
