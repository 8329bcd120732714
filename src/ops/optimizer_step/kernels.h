#pragma once

#include "ops/optimizer_step/optimizer_step.h"

namespace heddle::ops::adamw_reference {

void step(const std::vector<AdamwTensor>& tensors, const AdamwOptions& options);

}  // namespace heddle::ops::adamw_reference

namespace heddle::ops::adamw_cuda {

/// Adds "cuda.fused".
void add(Registry& registry);

}  // namespace heddle::ops::adamw_cuda

namespace heddle::ops::optimizer_step_cpu {

void adamw(const std::vector<AdamwTensor>& tensors, const AdamwOptions& options);
/// Sum of squares over all (defined, CPU) tensors, the same bits for any number of threads.
double square_sum(const std::vector<at::Tensor>& tensors);

}  // namespace heddle::ops::optimizer_step_cpu
