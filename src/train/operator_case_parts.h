#pragma once

#include <ATen/ops/randn.h>

#include "train/operator_cases.h"

/// What the makers of cases share.
namespace heddle::train {

inline double as_double(std::int64_t n) { return static_cast<double>(n); }

/// A table with the one operator of these dimensions.
inline ops::KernelTable table_of(const OperatorPlace& place, const std::string& op,
                                 const ops::Dims& dims) {
  return ops::KernelTable::choose(ops::builtin_registry(), place.device.type(), place.dtype,
                                  {{op, {dims}}}, place.policy);
}

/// Normal deviates.
inline at::Tensor random(const OperatorPlace& place, at::IntArrayRef sizes) {
  return at::randn(sizes, at::TensorOptions().device(place.device).dtype(place.dtype));
}

}  // namespace heddle::train
