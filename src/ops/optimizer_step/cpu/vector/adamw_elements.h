#pragma once

#include "ops/cpu_dispatch.h"

namespace heddle::ops {

/// The scalars of one step, in the precision in which they are computed; rounded to that of the
/// elements once.
struct AdamwScalars {
  double decay = 1;  ///< 1 - lr * weight decay
  double beta1 = 0, beta2 = 0;
  double step_size = 0;         ///< lr / (1 - beta1^t)
  double root_correction2 = 1;  ///< sqrt(1 - beta2^t)
  double eps = 0;
  double gradient_multiplier = 1;
};

/// Elements [begin, end). `value` (the parameter, or its fp32 master), exp_avg and exp_avg_sq are
/// float (double for the double kernel); gradient is of `gradient_element`; `rounded`, if given, is
/// the bf16 parameter.
struct AdamwElements {
  void *value = nullptr, *exp_avg = nullptr, *exp_avg_sq = nullptr;
  const void* gradient = nullptr;
  void* rounded = nullptr;
};

using AdamwKernel = void (*)(const AdamwElements&, const AdamwScalars&, long begin, long end);
/// Sum of squares of elements [begin, end) in fp64.
using SquareSumKernel = double (*)(const void* elements, long begin, long end);

HEDDLE_CPU_DECLARE(AdamwKernel adamw_kernel(int value_element, int gradient_element))
HEDDLE_CPU_DECLARE(SquareSumKernel square_sum_kernel(int element))

}  // namespace heddle::ops
