#pragma once

#include "ops/cpu_dispatch.h"

namespace heddle::ops {

/// Rows of `width` elements T; gate and up (and their gradients) with their own row strides, y and
/// grad_y contiguous.
struct SwigluRows {
  const void *gate = nullptr, *up = nullptr;
  long gate_stride = 0, up_stride = 0;
  void* y = nullptr;
  const void* grad_y = nullptr;
  void *grad_gate = nullptr, *grad_up = nullptr;
  long grad_gate_stride = 0, grad_up_stride = 0;
  long width = 0;
};

struct SwigluKernels {
  void (*forward)(const SwigluRows&, long begin, long end);
  void (*backward)(const SwigluRows&, long begin, long end);
};

HEDDLE_CPU_DECLARE(SwigluKernels swiglu_kernels(int element))

}  // namespace heddle::ops
