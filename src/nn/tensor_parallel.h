#pragma once

#include <functional>

#include "nn/block.h"
#include "nn/linear.h"

namespace heddle::nn {

/// A part of a block whose heads or widths the ranks along tp share: a projection whose rows are
/// divided, and after it one whose columns are. Outside of it the tokens are divided: `x` are this
/// rank's rows [T/tp,H]. They are gathered for `part`, which maps all rows [T,H] to this rank's
/// partial products [T,H], and of their sum over the ranks each keeps its rows [T/tp,H]. Backward
/// the gather is a reduce-scatter, which the gradients of the weights in front run beside, and the
/// other way about. The gathered rows are kept for these, with Pass::recompute_elementwise
/// too: that repeats no communication. "Megatron-LM" (arXiv 1909.08053), section 3; "Reducing
/// Activation Recomputation" (arXiv 2205.05198), section 4.2.2.
///
/// The result is added to `residual` [T/tp,H], unless that is undefined: after the sum over ranks,
/// or, where one rank has all, by the projection: then this is part(x, residual), elsewhere `part`
/// is given none. `value_unused`: only gradients are wanted, the result has a shape.
at::Tensor run_tensor_parallel(
    const LinearInput& x, const Pass& pass, const at::Tensor& residual,
    const std::function<at::Tensor(const LinearInput& x, const at::Tensor& residual)>& part,
    bool value_unused = false);

/// residual + y. `value_unused`: as the backward sees it, its value is not read.
at::Tensor add_to_residual(const at::Tensor& residual, const at::Tensor& y, bool value_unused);

}  // namespace heddle::nn
