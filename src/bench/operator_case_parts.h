#pragma once

#include <string>

#include <ATen/core/Tensor.h>

#include "bench/operator_cases.h"

/// What the makers of cases share.
namespace heddle::bench {

inline double as_double(std::int64_t n) { return static_cast<double>(n); }

/// A table with the one operator of these dimensions.
ops::KernelTable table_of(const OperatorPlace& place, const std::string& op, const ops::Dims& dims);

/// Normal deviates.
at::Tensor random(const OperatorPlace& place, at::IntArrayRef sizes);

}  // namespace heddle::bench
