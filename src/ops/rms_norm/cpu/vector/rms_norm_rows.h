#pragma once

#include "ops/cpu_dispatch.h"

namespace heddle::ops {

/// Rows of x, contiguous, of `width` elements T; scale, rstd and grad_weight hold
/// compute<T>.
struct RmsNormRows {
  const void* x = nullptr;
  const void* residual = nullptr;  // null: none
  void* sum = nullptr;             // with a residual
  const void* scale = nullptr;
  void* y = nullptr;
  void* rstd = nullptr;
  double eps = 0;
  // Backward: x is the input of the norm.
  const void* grad_y = nullptr;
  const void* grad_sum = nullptr;  // null: none
  void* grad_x = nullptr;
  void* grad_weight = nullptr;  // [width], added to
  long width = 0;
};

struct RmsNormKernels {
  void (*forward)(const RmsNormRows&, long begin, long end);
  void (*backward)(const RmsNormRows&, long begin, long end);
};

HEDDLE_CPU_DECLARE(RmsNormKernels rms_norm_kernels(int element))

}  // namespace heddle::ops
