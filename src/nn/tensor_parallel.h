#pragma once

#include <functional>

#include "nn/block.h"
#include "nn/linear.h"

namespace heddle::nn {

/// A part of a block whose heads or widths the ranks along tp share: a projection whose rows are
/// divided, and behind it one whose columns are. Outside of it the tokens are divided: `x` are this
/// rank's rows [T/tp,H]. They are gathered for `part`, which maps all rows [T,H] to this rank's
/// partial products [T,H], and of their sum over the ranks each keeps its rows [T/tp,H]. Backward
/// the gather is a reduce-scatter, which the gradients of the weights in front run beside, and the
/// other way about. The gathered rows are kept for these, with BlockInputs::recompute_elementwise
/// too: that repeats no communication. "Megatron-LM" (arXiv 1909.08053), section 3; "Reducing
/// Activation Recomputation" (arXiv 2205.05198), section 4.2.2.
///
/// `value_unused`: only gradients are wanted, the result has a shape. Where one rank has all, this
/// is part(x).
at::Tensor run_tensor_parallel(const LinearInput& x, const BlockInputs& inputs,
                               const std::function<at::Tensor(const LinearInput&)>& part,
                               bool value_unused = false);

}  // namespace heddle::nn
