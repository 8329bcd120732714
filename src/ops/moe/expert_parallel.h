#pragma once

#include <functional>

#include "comm/group.h"
#include "ops/moe/moe.h"

namespace heddle::ops {

/// moe_experts where the ranks of `group` divide E experts evenly: inputs.gate_up, down and their
/// changes are those of this rank's E / size experts, inputs.experts counts over all E. A token
/// travels once to each rank that has experts for it; that rank weights and adds up what they make
/// of it, and one row comes back, to be added up here. Each of the sums is taken in fp32 or wider
/// and rounded to the dtype: in bf16 that is one rounding more than on one rank, of y and of the
/// gradient of x. No assignment is dropped; the ranks may have different numbers of tokens, and an
/// expert or a rank may get none. All ranks call it together, and so do their backwards.
/// TORCH_CHECKs that the indices lie in [0,E). "GShard" (arXiv 2006.16668), without its capacity,
/// and with a token's experts of one rank taken together as in "DeepEP" (DeepSeek-V3, arXiv
/// 2412.19437). `meanwhile`, unless empty, runs while the tokens are on their way, and its backward
/// while their gradients are.
at::Tensor moe_experts_parallel(const KernelTable& kernels, const MoeExperts::Inputs& inputs,
                                const comm::Group& group,
                                const std::function<void()>& meanwhile = {});

/// To how many of `ranks` ranks a token goes that chooses top_k of `experts` experts, all equally
/// often.
double expected_expert_ranks(std::int64_t experts, std::int64_t top_k, std::int64_t ranks);

}  // namespace heddle::ops
