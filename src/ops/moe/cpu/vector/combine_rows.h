#pragma once

#include "ops/cpu_dispatch.h"

namespace heddle::ops {

/// Sorted rows [count,width] of T and the tokens they belong to: row place[t * k + j] is token t's
/// j-th; it has none where that is not below count.
struct CombineRows {
  const void* rows = nullptr;
  const void* weights = nullptr;  // [T,k] of T; null: 1
  const long* place = nullptr;
  void* out = nullptr;           // gather: [T,width]
  const void* grad_y = nullptr;  // scatter: [T,width]
  void* grad_rows = nullptr;     // [count,width]
  void* grad_weights = nullptr;  // [T,k]
  long count = 0, k = 0, width = 0;
};

struct CombineKernels {
  /// out[t] = sum over j of weights[t,j] * rows[place[t,j]].
  void (*gather)(const CombineRows&, long begin_token, long end_token);
  /// grad_rows[place[t,j]] = weights[t,j] * grad_y[t]; grad_weights[t,j] = grad_y[t] . rows[place].
  void (*scatter)(const CombineRows&, long begin_token, long end_token);
};

HEDDLE_CPU_DECLARE(CombineKernels combine_kernels(int element))

}  // namespace heddle::ops
