#pragma once

#include <memory>
#include <utility>

#include <ATen/core/Tensor.h>

namespace heddle::ops {

/// Memory for the gradients of the two halves [T,n,D] of a tensor [T,n,2D]: what is written there
/// needs no copy to be one gradient.
class GradientHalves {
 public:
  /// Half 0 or 1; `like` is one of the two tensors.
  at::Tensor half(std::int64_t index, const at::Tensor& like);
  /// Both, if these gradients are what half() gave for them; otherwise joined by a copy.
  at::Tensor joined(const at::Tensor& first, const at::Tensor& second);

 private:
  at::Tensor whole_;  ///< Made when the first of them is asked for.
};

struct Halves {
  at::Tensor first, second;
  std::shared_ptr<GradientHalves> gradients;
};

/// The halves of x [T,n,2D], sharing its memory. Differentiable.
Halves split_halves(const at::Tensor& x);

}  // namespace heddle::ops
