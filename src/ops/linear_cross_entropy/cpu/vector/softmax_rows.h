#pragma once

#include "ops/cpu_dispatch.h"

namespace heddle::ops {

/// One row of logits (float or double). Writes log p(label) to `logprob` and the entropy of p, in
/// nats, to `entropy`; if `factor` is given, turns the row into factor * (softmax -
/// one_hot(label)), less by_entropy * p (log p + entropy) if that is given too.
struct SoftmaxRowKernels {
  void (*run_float)(float* logits, long width, long label, const float* factor,
                    const float* by_entropy, float* logprob, float* entropy);
  void (*run_double)(double* logits, long width, long label, const double* factor,
                     const double* by_entropy, double* logprob, double* entropy);
};

HEDDLE_CPU_DECLARE(SoftmaxRowKernels softmax_row_kernels())

}  // namespace heddle::ops
