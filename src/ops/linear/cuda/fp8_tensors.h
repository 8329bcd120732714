#pragma once

#include "ops/cuda/eight_bit.h"

namespace heddle::ops::linear_fp8 {

/// Rows of a bf16 matrix in 8 bits: what lies beside it, or a conversion.
cuda::EightBitRows rows_of(const at::Tensor& x);
/// The rows of x^T.
cuda::EightBitRows columns_of(const at::Tensor& x);

/// a b^T in bf16, by libtorch.
at::Tensor product_of(const cuda::EightBitRows& a, const cuda::EightBitRows& b);
void product_into(at::Tensor& y, const cuda::EightBitRows& a, const cuda::EightBitRows& b);

}  // namespace heddle::ops::linear_fp8
