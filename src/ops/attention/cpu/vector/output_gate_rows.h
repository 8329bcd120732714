#pragma once

#include "ops/cpu_dispatch.h"

namespace heddle::ops {

/// Heads of tokens [T,n,D]: gate at token * token_stride + head * head_stride, all else contiguous.
struct OutputGateRows {
  const void *x = nullptr, *gate = nullptr;
  long token_stride = 0, head_stride = 0;
  void* y = nullptr;
  const void* grad_y = nullptr;
  void *grad_x = nullptr, *grad_gate = nullptr;
  long heads = 0, dim = 0;
};

struct OutputGateKernels {
  void (*forward)(const OutputGateRows&, long begin_token, long end_token);
  void (*backward)(const OutputGateRows&, long begin_token, long end_token);
};

HEDDLE_CPU_DECLARE(OutputGateKernels output_gate_kernels(int element))

}  // namespace heddle::ops
