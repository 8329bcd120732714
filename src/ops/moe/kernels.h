#pragma once

#include "ops/moe/moe.h"
#include "ops/moe/order.h"
#include "ops/moe/shared_expert.h"

namespace heddle::ops {

/// y [T,H]: y[t] = sum over j of weights[t,j] * the row of assignment (t,j) of rows [N,H]; weights
/// [T,k] undefined: 1.
at::Tensor combine_rows(const at::Tensor& rows, const at::Tensor& weights, const at::Tensor& place,
                        std::int64_t k);
struct CombineGradients {
  at::Tensor rows, weights;
};
/// Gradients of combine_rows with weights.
CombineGradients combine_rows_backward(const at::Tensor& rows, const at::Tensor& weights,
                                       const MoeOrder& order, const at::Tensor& grad_y);

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

namespace heddle::ops::moe_route_reference {

MoeRouting forward(const MoeRoute::Inputs& inputs);
at::Tensor backward(const MoeRoute::Inputs& inputs, const MoeRouting& routing,
                    const at::Tensor& grad_weights, const at::Tensor& grad_probabilities);

}  // namespace heddle::ops::moe_route_reference

namespace heddle::ops::shared_expert_reference {

at::Tensor forward(const at::Tensor& routed, const at::Tensor& shared, const at::Tensor& gate,
                   const at::Tensor& residual);
std::pair<at::Tensor, at::Tensor> backward(const at::Tensor& shared, const at::Tensor& gate,
                                           const at::Tensor& grad_y);

}  // namespace heddle::ops::shared_expert_reference

namespace heddle::ops::moe_experts_reference {

MoeExperts::Forward forward(const MoeExperts::Inputs& inputs, bool keep);
MoeExperts::Gradients backward(const MoeExperts::Inputs& inputs, const MoeExperts::Forward& saved,
                               const at::Tensor& grad_y, bool want_weight_gradients,
                               const at::Tensor& grad_branch);

}  // namespace heddle::ops::moe_experts_reference

namespace heddle::ops::moe_experts_cpu {

MoeExperts::Forward forward(const MoeExperts::Inputs& inputs, bool keep);
MoeExperts::Gradients backward(const MoeExperts::Inputs& inputs, const MoeExperts::Forward& saved,
                               const at::Tensor& grad_y, bool want_weight_gradients,
                               const at::Tensor& grad_branch);
at::Tensor sum(const at::Tensor& rows, const at::Tensor& place, std::int64_t k);

}  // namespace heddle::ops::moe_experts_cpu
