#pragma once

#include "ops/autograd.h"
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

/// Finds the rows of a MoeOrder that have each change. An expert's rows are in the order of their
/// tokens, so those of one set lie together.
class ChangedExperts {
 public:
  /// One of the two matrices.
  using Matrix = ExpertLowRank ExpertChanges::*;

  /// `changes` outlive it.
  ChangedExperts(const MoeOrder& order, const std::vector<ExpertChanges>& changes);

  bool has(Matrix matrix) const;
  /// Room for x down_e^T of each set's rows [n,r]; undefined where it leaves the matrix alone.
  Tensors lows(Matrix matrix) const;
  /// y += (x down_e^T) up_e^T for the rows of expert e of the whole x [N,in] and y [N,out]; `lows`
  /// receive x down_e^T.
  void add(Matrix matrix, std::int64_t e, const at::Tensor& x, const Tensors& lows,
           const at::Tensor& y) const;
  /// The backward of add(): adds to dx and writes the gradients of expert e.
  void add_backward(Matrix matrix, std::int64_t e, const at::Tensor& x, const Tensors& lows,
                    const at::Tensor& dy, const at::Tensor& dx,
                    std::vector<ExpertChanges>& gradients) const;
  /// Zero gradients of the shape of the changes: experts without rows keep them.
  std::vector<ExpertChanges> zeros() const;

 private:
  struct Part {
    std::size_t set;
    std::int64_t begin, count;  ///< Rows of the order.
    std::int64_t low;           ///< First row among the set's own.
  };
  const std::vector<ExpertChanges>& changes_;
  std::vector<std::vector<Part>> parts_;  ///< By expert.
  std::vector<std::int64_t> rows_;        ///< Their number, by set.
};

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
