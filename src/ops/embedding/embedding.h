#pragma once

#include "ops/registry.h"

namespace heddle::ops {

/// The gradient of a table whose rows were looked up.
struct Embedding {
  static constexpr const char* kName = "embedding";
  using Dims = AnyDims;
  struct Functions {
    /// table_gradient[tokens[t]] += grad_y[t]. tokens [T] int64; grad_y [T,H]; table_gradient [V,H]
    /// contiguous, of any floating dtype.
    void (*backward)(const at::Tensor& tokens, const at::Tensor& grad_y,
                     at::Tensor& table_gradient);
  };
};

}  // namespace heddle::ops
