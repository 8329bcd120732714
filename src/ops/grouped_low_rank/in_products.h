#pragma once

#include "ops/grouped_low_rank/grouped_low_rank.h"
#include "ops/linear/linear.h"

namespace heddle::ops {

/// Each sum of products, of one layer, with the changes that rows have in it: y needs no pass of
/// its own for them. Onto `residual` unless it is undefined. Nothing where the kernels of `linear`
/// have no such launch for these.
Tensors outputs_with_lows(const Linear::Functions& linear, const std::vector<Products>& sums,
                          const at::Tensor& residual, const at::Tensor& lows,
                          const LowRankGroups& groups);

/// The gradient of the input, sum of a b over the terms, with that through the changes; undefined
/// where the kernels of `linear` have no such launch.
at::Tensor input_gradient_with_lows(const Linear::Functions& linear, const Products& terms,
                                    const at::Tensor& d_lows, const LowRankGroups& groups);

}  // namespace heddle::ops
