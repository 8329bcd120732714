#pragma once

#include <vector>

#include <ATen/core/Tensor.h>

namespace heddle::ops {

/// The dtype of statistics and sums over values of `dtype`: fp64 for fp64, else fp32.
inline c10::ScalarType compute_type(c10::ScalarType dtype) {
  return dtype == c10::ScalarType::Double ? c10::ScalarType::Double : c10::ScalarType::Float;
}

inline c10::ScalarType compute_type(const at::Tensor& tensor) {
  return compute_type(tensor.scalar_type());
}

/// Dtypes that our CPU kernels take.
inline std::vector<c10::ScalarType> cpu_kernel_dtypes() {
  return {c10::ScalarType::Float, c10::ScalarType::BFloat16, c10::ScalarType::Double};
}

/// Dtypes that the reference kernels take.
inline std::vector<c10::ScalarType> reference_dtypes() {
  return {c10::ScalarType::Float, c10::ScalarType::BFloat16, c10::ScalarType::Half,
          c10::ScalarType::Double};
}

}  // namespace heddle::ops
