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

/// Index of a dtype in the CPU kernels' tables of vector functions.
enum CpuElement : int { kCpuFloat = 0, kCpuBFloat16 = 1, kCpuDouble = 2 };

inline int cpu_element(const at::Tensor& tensor) {
  switch (tensor.scalar_type()) {
    case c10::ScalarType::Float:
      return kCpuFloat;
    case c10::ScalarType::BFloat16:
      return kCpuBFloat16;
    case c10::ScalarType::Double:
      return kCpuDouble;
    default:
      TORCH_CHECK(false, "the CPU kernels take float32, bfloat16 and float64, not ",
                  tensor.scalar_type());
  }
}

}  // namespace heddle::ops
