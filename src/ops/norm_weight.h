#pragma once

#include <utility>

#include <ATen/core/Tensor.h>

namespace heddle::ops {

/// Weight [D] of an RMSNorm, which scales by offset + value. A tensor alone is zero-centred.
struct NormWeight {
  NormWeight(at::Tensor weight, float added = 1) : value(std::move(weight)), offset(added) {}

  at::Tensor value;
  float offset;  ///< 1 for zero-centred weights (Qwen3.5, Qwen3-Next), 0 for plain ones (Qwen3).

  /// The scale [D] in this type.
  at::Tensor scale(c10::ScalarType type) const;
};

}  // namespace heddle::ops
