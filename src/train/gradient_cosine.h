#pragma once

#include <optional>
#include <utility>
#include <vector>

#include <ATen/core/Tensor.h>

#include "comm/group.h"
#include "nn/parameter.h"

namespace heddle::train {

/// Cosine of the angle between the whole gradients of two steps that follow each other
/// (train.grad_cosine). Stale rollouts align them (arXiv 2603.01501). Keeps a copy of the gradients
/// that this rank owns; checkpoints do not have it.
class GradientCosine {
 public:
  /// `owners`: the ranks that the gradients are divided over, as Optimizer::Ranks::owners.
  GradientCosine(std::vector<nn::Parameter*> parameters, comm::Group owners)
      : parameters_(std::move(parameters)), owners_(std::move(owners)) {}

  /// Compares the gradients with those of the call before and keeps them. `norm`: that of the whole
  /// gradient, on all ranks. Nothing at the first call and where a gradient is 0. Called by all
  /// owners together, before the gradients are cleared.
  std::optional<double> next(double norm);

 private:
  std::vector<nn::Parameter*> parameters_;
  comm::Group owners_;
  std::vector<at::Tensor> before_;  ///< By parameter; undefined where there was none.
  double norm_before_ = 0;          ///< 0: no step is known.
};

}  // namespace heddle::train
