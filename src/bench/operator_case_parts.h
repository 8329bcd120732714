#pragma once

#include <vector>

#include <ATen/core/Tensor.h>

#include "bench/operator_cases.h"

/// Shared by the makers of cases.
namespace heddle::bench {

inline double as_double(std::int64_t n) { return static_cast<double>(n); }

/// A table with these operators, and choices in their order.
ops::KernelTable table_of(const OperatorPlace& place, const std::vector<ops::OpRequest>& requests);

/// Normal deviates.
at::Tensor random(const OperatorPlace& place, at::IntArrayRef sizes);

}  // namespace heddle::bench
