#pragma once

#include "ops/cpu_dispatch.h"

namespace heddle::ops {

/// Heads of tokens: x at token * token_stride + head * head_stride, y, grad_y and grad_x
/// contiguous [T,n,D]; cos, sin [T,half], scale, rstd, grad_weight and scratch hold
/// compute<T>.
struct QkNormRopeRows {
  const void* x = nullptr;
  long token_stride = 0, head_stride = 0;
  const void *scale = nullptr, *cos = nullptr, *sin = nullptr;
  void* y = nullptr;
  void* rstd = nullptr;
  double eps = 0;
  const void* grad_y = nullptr;
  void* grad_x = nullptr;
  void* grad_weight = nullptr;  // [D], added to
  void* scratch = nullptr;      // [D] of this thread
  long heads = 0, dim = 0, half = 0;
};

struct QkNormRopeKernels {
  void (*forward)(const QkNormRopeRows&, long begin_token, long end_token);
  void (*backward)(const QkNormRopeRows&, long begin_token, long end_token);
};

HEDDLE_CPU_DECLARE(QkNormRopeKernels qk_norm_rope_kernels(int element))

}  // namespace heddle::ops
