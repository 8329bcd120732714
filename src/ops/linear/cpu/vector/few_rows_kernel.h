#pragma once

#include "ops/cpu_dispatch.h"

namespace heddle::ops {

/// x [rows,depth] and weight [columns,depth], unit stride along depth, in float or bfloat16.
struct FewRows {
  const void* x;
  const void* weight;
  void* y;  ///< [rows,columns], same type.
  long rows, depth, columns;
  long x_stride, weight_stride;
};

struct FewRowsKernels {
  /// y[:, begin:end) = x weight[begin:end)^T; sums in fp32. `lanes` as filled by pack, or null.
  void (*multiply)(const FewRows&, const float* lanes, long begin, long end);
  /// x with its rows side by side: [ceil(rows / kPackedRows), depth, kPackedRows], zero filled.
  void (*pack)(const FewRows&, float* lanes);
  /// Rows from which on the packed form is the faster one; more than any count where it never is.
  long packed_from;
};

constexpr long kPackedRows = 16;

HEDDLE_CPU_DECLARE(FewRowsKernels few_rows_kernels(bool bfloat16))

}  // namespace heddle::ops
