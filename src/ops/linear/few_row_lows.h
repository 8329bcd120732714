#pragma once

#include <vector>

#include "ops/linear/linear.h"

namespace heddle::ops {

/// For each factor a [r,k], scale x a^T of x [T,k], all in one launch: a token of some sequences
/// has no time for more. Nothing where the kernels of `linear` have no such launch for x.
Tensors few_row_lows(const Linear::Functions& linear, const at::Tensor& x, const Tensors& as,
                     const std::vector<double>& scales);

}  // namespace heddle::ops
