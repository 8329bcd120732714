#pragma once

#include <utility>
#include <vector>

#include "ops/linear_cross_entropy/linear_cross_entropy.h"

namespace heddle::ops {

/// Changes of the head, chunk by chunk of the rows: kernels call it where a chunk's logits, and
/// later their gradients, are there.
class HeadChanges {
 public:
  HeadChanges(const LinearCrossEntropy::Inputs& inputs, bool want_gradients);

  /// Adds the changes to logits of the rows from `begin` on.
  void add_to(at::Tensor& logits, std::int64_t begin) const;
  /// Takes the gradients by these rows' logits; `factors` [n,1], unless undefined, are still to be
  /// multiplied with them.
  void take(const at::Tensor& d_logits, std::int64_t begin, const at::Tensor& factors = {});
  std::vector<LinearCrossEntropy::ChangeGradient> gradients() { return std::move(gradients_); }

 private:
  const std::vector<LinearCrossEntropy::Change>& changes_;
  std::vector<LinearCrossEntropy::ChangeGradient> gradients_;  ///< Empty: not wanted.
};

}  // namespace heddle::ops

namespace heddle::ops::linear_cross_entropy_reference {

LinearCrossEntropy::Result forward(const LinearCrossEntropy::Inputs& inputs, bool want_grad_hidden,
                                   bool want_grad_weight, at::Tensor& grad_weight_buffer);

}  // namespace heddle::ops::linear_cross_entropy_reference

/// With Inputs::support, on every device: reads those rows of the head alone.
namespace heddle::ops::linear_cross_entropy_over_support {

LinearCrossEntropy::Result forward(const LinearCrossEntropy::Inputs& inputs, bool want_grad_hidden,
                                   bool want_grad_weight, at::Tensor& grad_weight_buffer);

}  // namespace heddle::ops::linear_cross_entropy_over_support

namespace heddle::ops::linear_cross_entropy_cpu {

LinearCrossEntropy::Result forward(const LinearCrossEntropy::Inputs& inputs, bool want_grad_hidden,
                                   bool want_grad_weight, at::Tensor& grad_weight_buffer);

}  // namespace heddle::ops::linear_cross_entropy_cpu
