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

  /// Whether a change of some set multiplies the rows that were sent to the matrix.
  bool reads_rows(Matrix matrix) const;
  /// Room for x down_e^T of each set's rows [n,r], or for its gradient; undefined where it leaves
  /// the matrix alone.
  Tensors lows(Matrix matrix) const;
  /// y += (x down_e^T) up_e^T for the rows of expert e of the whole x [N,in] and y [N,out]; `lows`
  /// receive x down_e^T. Factors that experts share are left to what follows.
  void add(Matrix matrix, std::int64_t e, const at::Tensor& x, const Tensors& lows,
           const at::Tensor& y) const;
  /// The backward of add(): `d_lows` receive the gradients of `lows`; adds to dx and writes the
  /// gradients of expert e.
  void add_backward(Matrix matrix, std::int64_t e, const at::Tensor& x, const Tensors& lows,
                    const at::Tensor& dy, const at::Tensor& dx, const Tensors& d_lows,
                    std::vector<ExpertChanges>& gradients) const;

  // Factors that experts share, by token: a token's rows have the same low, or their sum is
  // multiplied.
  /// Makes, before add(), the lows of gate_up where its `down` is shared, of x [T,H].
  void send_lows(const at::Tensor& x, const Tensors& lows) const;
  /// The backward of send_lows(): adds to dx [T,H] and writes the gradient of the factor.
  void send_lows_backward(const at::Tensor& x, const Tensors& d_lows, const at::Tensor& dx,
                          std::vector<ExpertChanges>& gradients) const;
  /// Adds to y [T,H], after add(), what the lows of down make of its `up` where that is shared.
  /// weights [T,k].
  void sum_lows(const Tensors& lows, const at::Tensor& weights, const at::Tensor& y) const;
  /// The backward of sum_lows(): writes `d_lows` and the gradient of the factor, and adds to
  /// d_weights [T,k].
  void sum_lows_backward(const Tensors& lows, const at::Tensor& weights, const at::Tensor& dy,
                         const Tensors& d_lows, const at::Tensor& d_weights,
                         std::vector<ExpertChanges>& gradients) const;

  /// Zero gradients of the shape of the changes: experts without rows keep them.
  std::vector<ExpertChanges> zeros() const;

 private:
  /// The tokens of a set, and the order of its own rows.
  struct OwnOrder {
    std::int64_t first = 0, tokens = 0;
    MoeOrder order;

    at::Tensor of(const at::Tensor& by_token) const { return by_token.narrow(0, first, tokens); }
  };
  void find_own_orders(const MoeOrder& order);
  struct Part {
    std::size_t set;
    std::int64_t begin, count;  ///< Rows of the order.
    std::int64_t low;           ///< First row among the set's own.
  };
  const std::vector<ExpertChanges>& changes_;
  std::vector<std::vector<Part>> parts_;  ///< By expert.
  std::vector<std::int64_t> rows_;        ///< Their number, by set.
  std::vector<OwnOrder> own_orders_;      ///< By set; empty if no factor is shared.
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
