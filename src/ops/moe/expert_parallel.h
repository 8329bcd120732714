#pragma once

#include <functional>

#include "comm/group.h"
#include "ops/moe/moe.h"

namespace heddle::ops {

/// moe_experts where the ranks of `group` divide E experts evenly: inputs.gate_up, down and their
/// changes are those of this rank's E / size experts, inputs.experts counts over all E. Each
/// assignment travels to the rank that has its expert and back, none is dropped; the ranks may have
/// different numbers of tokens, and an expert or a rank may get none. All ranks call it together,
/// and so do their backwards. "GShard" (arXiv 2006.16668), without its capacity. `meanwhile`,
/// unless empty, runs while the tokens are on their way, and its backward while their gradients
/// are.
at::Tensor moe_experts_parallel(const KernelTable& kernels, const MoeExperts::Inputs& inputs,
                                const comm::Group& group,
                                const std::function<void()>& meanwhile = {});

}  // namespace heddle::ops
