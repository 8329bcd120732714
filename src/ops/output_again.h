#pragma once

#include <functional>

#include <ATen/core/Tensor.h>

namespace heddle::ops {

/// Takes an operator's output once more in the backward, made again with the gradients of the
/// inputs: layers that read the output need not keep it until then. Empty: nobody wants it.
using OutputAgain = std::function<void(const at::Tensor& output)>;

}  // namespace heddle::ops
