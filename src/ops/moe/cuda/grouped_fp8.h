#pragma once

#include "ops/moe/moe.h"

/// moe_experts with frozen experts in e4m3 (frozen_experts.h). Low-rank changes are not taken.
namespace heddle::ops::moe_experts_fp8 {

MoeExperts::Forward forward(const MoeExperts::Inputs& in, bool keep);
MoeExperts::Gradients backward(const MoeExperts::Inputs& in, const MoeExperts::Forward& saved,
                               const at::Tensor& grad_y, const at::Tensor& grad_branch);

}  // namespace heddle::ops::moe_experts_fp8
