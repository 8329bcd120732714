#pragma once

#include <ATen/core/Tensor.h>

namespace heddle::ops {

/// Whether few_rows_product takes these: CPU, float or bfloat16, unit stride along the depth, at
/// most 32 rows.
bool few_rows_fits(const at::Tensor& x, const at::Tensor& weight);

/// x weight^T for a few rows of x, as generation has them: x [R,in], weight [out,in], both
/// detached; returns [R,out]. Such a product is bound by reading the weight once, which a BLAS made
/// for large products does at a fraction of the memory's speed. Sums in fp32; the same bits for
/// every number of threads.
at::Tensor few_rows_product(const at::Tensor& x, const at::Tensor& weight);

}  // namespace heddle::ops
