#pragma once

#include "ops/cpu_dispatch.h"

/// The interface between cpu/norm.cpp, which knows tensors and threads, and cpu/vector/norm.cpp.
/// Plain C++.
namespace heddle::ops::gdn_cpu {

/// Storage ("x") or computation ("c") dtype. Row r of x and z is head r % H of token r / H.
struct NormArgs {
  long H, V;
  double eps;
  const void *x, *z;  // x; token strides in elements, heads contiguous
  long x_stride, z_stride;
  const void* weight;  // c [V]
  void* y;             // x [T,H,V]
  void* rstd;          // c [T,H]
  const void* dy;      // x [T,H,V]
  void *dx, *dz;       // x [T,H,V]
};

struct NormKernels {
  void (*forward[3])(const NormArgs&, long first_row, long last_row);
  /// Adds to dw, c [V], which the caller has zeroed.
  void (*backward[3])(const NormArgs&, long first_row, long last_row, void* dw);
};

HEDDLE_CPU_DECLARE(const NormKernels& norm_kernels())

}  // namespace heddle::ops::gdn_cpu
