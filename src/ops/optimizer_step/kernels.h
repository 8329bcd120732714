#pragma once

#include "ops/optimizer_step/optimizer_step.h"

namespace heddle::ops::adamw_reference {

void step(const std::vector<AdamwTensor>& tensors, const AdamwOptions& options);

}  // namespace heddle::ops::adamw_reference

namespace heddle::ops::adamw_cuda {

/// Adds "cuda.fused".
void add(Registry& registry);

}  // namespace heddle::ops::adamw_cuda
