#pragma once

#include <functional>

#include "nn/block.h"
#include "nn/linear.h"

namespace heddle::nn {

/// A part of a block whose heads or widths the ranks along tp share: a projection whose rows are
/// divided, and behind it one whose columns are. Outside of it the tokens are divided: `x` are this
/// rank's rows [T/tp,H]. They are gathered for `part`, which maps all rows [T,H] to this rank's
/// partial products [T,H], and of their sum over the ranks each keeps its rows [T/tp,H]. Backward
/// the gather is a reduce-scatter and the other way about. With
/// BlockInputs::recompute_elementwise the gathered rows are not kept, but gathered again while the
/// backward of `part` runs. "Megatron-LM" (arXiv 1909.08053), section 3; "Reducing Activation
/// Recomputation" (arXiv 2205.05198), section 4.2.2.
///
/// `value_unused`: only gradients are wanted, the result has a shape. Where one rank has all, this
/// is part(x).
at::Tensor run_tensor_parallel(const LinearInput& x, const BlockInputs& inputs,
                               const std::function<at::Tensor(const LinearInput&)>& part,
                               bool value_unused = false);

}  // namespace heddle::nn
