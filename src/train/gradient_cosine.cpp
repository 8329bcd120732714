#include "train/gradient_cosine.h"

#include <ATen/ops/dot.h>

#include <algorithm>
#include <cstdint>

#include "ops/autograd.h"

namespace heddle::train {
namespace {

/// Numbers that are widened at a time: 128 MiB in float64.
constexpr std::int64_t kPiece = std::int64_t{1} << 24;

/// Adds the product of two tensors to a sum (0-d) on their device, in float64, which NPUs do not
/// have. An undefined sum is 0.
void add_product(const at::Tensor& a, const at::Tensor& b, at::Tensor& sum) {
  const auto wide = a.is_cpu() || a.is_cuda() ? at::kDouble : at::kFloat;
  const at::Tensor x = a.reshape({-1}), y = b.reshape({-1});
  for (std::int64_t begin = 0; begin < x.numel(); begin += kPiece) {
    const std::int64_t count = std::min(kPiece, x.numel() - begin);
    const at::Tensor part =
        at::dot(x.narrow(0, begin, count).to(wide), y.narrow(0, begin, count).to(wide));
    sum = sum.defined() ? sum.add_(part) : part;
  }
}

}  // namespace

std::optional<double> GradientCosine::next(double norm) {
  const ops::NoGradient guard;
  std::optional<double> cosine;
  if (norm_before_ > 0 && norm > 0) {
    at::Tensor product;
    for (std::size_t i = 0; i < parameters_.size(); ++i) {
      const at::Tensor& gradient = parameters_[i]->gradient();
      // Another rank counts a copy.
      if (parameters_[i]->is_copy() || !gradient.defined() || !before_[i].defined()) continue;
      add_product(gradient, before_[i], product);
    }
    const double own = product.defined() ? product.item<double>() : 0;
    cosine = owners_.all_reduce_sum(own) / (norm * norm_before_);
  }
  // A step that fails for want of memory may run again: it is known once all of it is kept.
  norm_before_ = 0;
  before_.resize(parameters_.size());
  for (std::size_t i = 0; i < parameters_.size(); ++i) {
    const at::Tensor& gradient = parameters_[i]->gradient();
    if (parameters_[i]->is_copy() || !gradient.defined()) {
      before_[i].reset();
    } else if (before_[i].defined()) {
      before_[i].copy_(gradient);
    } else {
      before_[i] = gradient.clone();
    }
  }
  norm_before_ = norm;
  return cosine;
}

}  // namespace heddle::train
