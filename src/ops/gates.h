#pragma once

#include <ATen/core/Tensor.h>

namespace heddle::ops {

/// sigmoid(x) and log(1 + exp(x)), differentiable, of which an element has the same bits wherever
/// it stands in x. libtorch's CPU kernels compute most of a tensor by vectors and the rest, or that
/// of each thread's part, one by one with another rounding: the gates of a sequence would depend on
/// what else is in its pack.
at::Tensor sigmoid(const at::Tensor& x);
at::Tensor softplus(const at::Tensor& x);

}  // namespace heddle::ops
