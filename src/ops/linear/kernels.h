#pragma once

#include "ops/linear/linear.h"

namespace heddle::ops::linear_reference {

/// A product of libtorch for the first term, to which those of the others add.
Tensors forward(const std::vector<Products>& sums);
/// Adds x to the rounded result of a kernel's forward.
template <Tensors (*forward)(const std::vector<Products>&)>
at::Tensor forward_onto(const at::Tensor& x, const Products& terms) {
  return forward({terms})[0].add_(x);
}
at::Tensor backward(const Products& terms);
Linear::Functions::LowRankGradients low_rank_backward(const std::vector<LowRankChange>& changes);
/// One factor after the other, with its mask as a tensor.
at::Tensor dropped_low(const at::Tensor& x, const DroppedFactors& factors);
at::Tensor dropped_gradient(const at::Tensor& x, const at::Tensor& d_low,
                            const DroppedFactors& factors);
void add_dropped(at::Tensor& dx, const at::Tensor& d_low, const DroppedFactors& factors);

}  // namespace heddle::ops::linear_reference

namespace heddle::ops::linear_cuda {

Tensors forward(const std::vector<Products>& sums);
at::Tensor forward_onto(const at::Tensor& x, const Products& terms);
at::Tensor backward(const Products& terms);
Linear::Functions::LowRankGradients low_rank_backward(const std::vector<LowRankChange>& changes);
at::Tensor dropped_low(const at::Tensor& x, const DroppedFactors& factors);
at::Tensor dropped_gradient(const at::Tensor& x, const at::Tensor& d_low,
                            const DroppedFactors& factors);
void add_dropped(at::Tensor& dx, const at::Tensor& d_low, const DroppedFactors& factors);
/// Whether low_rank_backward reads dy once for both of its results.
bool reads_once(std::int64_t rank);
/// Warns of a rank of adapters for which it does not.
std::vector<std::string> rank_warnings(const Linear::Dims& dims);

}  // namespace heddle::ops::linear_cuda
