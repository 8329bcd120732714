#include "ops/norm_weight.h"

#include <ATen/TensorOperators.h>

namespace heddle::ops {

at::Tensor NormWeight::scale(c10::ScalarType type) const { return value.to(type) + offset; }

}  // namespace heddle::ops
