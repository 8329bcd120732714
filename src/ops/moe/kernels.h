#pragma once

#include "ops/moe/moe.h"

namespace heddle::ops {

/// The assignments (t, j) in the order of their experts, ties in the order of t: what every kernel
/// of moe_experts works on. N = T x k.
struct MoeOrder {
  at::Tensor source;                 ///< [N] int64: the assignment t * k + j at each sorted place.
  at::Tensor place;                  ///< [N] int64: the sorted place of each assignment.
  at::Tensor token;                  ///< [N] int64: source / k.
  std::vector<std::int64_t> starts;  ///< [E+1] on the host: first place of each expert.
};

/// Stable counting sort by expert. TORCH_CHECKs that the indices lie in [0, expert_count).
MoeOrder moe_order(const at::Tensor& experts, std::int64_t expert_count);

/// y += (x down_e^T) up_e^T for the rows of expert e; `low` receives x down_e^T. x [n,in], low
/// [n,r], y [n,out]. Does nothing without a change.
void add_low_rank(const ExpertLowRank& change, std::int64_t e, const at::Tensor& x, at::Tensor low,
                  at::Tensor y);
/// The backward of add_low_rank: adds to dx and writes the gradients of expert e.
void add_low_rank_backward(const ExpertLowRank& change, std::int64_t e, const at::Tensor& x,
                           const at::Tensor& low, const at::Tensor& dy, at::Tensor dx,
                           ExpertLowRank& gradients);
/// Room for `low` of n rows; undefined without a change.
at::Tensor low_rank_rows(const ExpertLowRank& change, std::int64_t n);
/// Zero gradients of the shape of a change (experts without rows keep them); undefined without one.
ExpertLowRank low_rank_zeros(const ExpertLowRank& change);

}  // namespace heddle::ops

namespace heddle::ops::moe_experts_reference {

MoeExperts::Forward forward(const MoeExperts::Inputs& inputs, bool keep);
MoeExperts::Gradients backward(const MoeExperts::Inputs& inputs, const MoeExperts::Forward& saved,
                               const at::Tensor& grad_y, bool want_weight_gradients);

}  // namespace heddle::ops::moe_experts_reference

namespace heddle::ops::moe_experts_grouped_mm {

/// Adds "cuda.grouped_mm".
void add(Registry& registry);

}  // namespace heddle::ops::moe_experts_grouped_mm

namespace heddle::ops::moe_experts_cpu {

MoeExperts::Forward forward(const MoeExperts::Inputs& inputs, bool keep);
MoeExperts::Gradients backward(const MoeExperts::Inputs& inputs, const MoeExperts::Forward& saved,
                               const at::Tensor& grad_y, bool want_weight_gradients);

}  // namespace heddle::ops::moe_experts_cpu
