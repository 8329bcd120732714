#pragma once

#include <cstdint>
#include <vector>

#include "ops/linear/linear.h"

namespace heddle::ops::linear_cuda {

/// Rows from which on product_sum takes sums of products.
constexpr std::int64_t kFewestRows = 512;

/// Whether the kernel of few rows takes these sums: up to 16 rows.
bool are_few_rows(const std::vector<Products>& sums);
/// One launch. `start` [T,n], unless undefined, is what the only sum is added to.
Tensors run_few_rows(const std::vector<Products>& sums, const at::Tensor& start = {},
                     const std::vector<double>& scales = {});

/// Whether some of these products of more than a few rows are narrow or have low-rank terms, so
/// that they cost launches more than anything else.
bool are_some_rows(const std::vector<Products>& sums);
/// Two launches besides cuBLAS's products of the wide layers: the narrow layers, and the low-rank
/// terms of the wide ones.
Tensors run_some_rows(const std::vector<Products>& sums, const at::Tensor& start = {});

}  // namespace heddle::ops::linear_cuda
