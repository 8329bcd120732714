#pragma once

#include <string>

#include <ATen/core/Tensor.h>

#include "bench/operator_cases.h"

/// Shared by the makers of cases.
namespace heddle::bench {

inline double as_double(std::int64_t n) { return static_cast<double>(n); }

/// A table with the one operator.
ops::KernelTable table_of(const OperatorPlace& place, const ops::OpRequest& request);

/// Normal deviates.
at::Tensor random(const OperatorPlace& place, at::IntArrayRef sizes);

}  // namespace heddle::bench
