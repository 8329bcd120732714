#pragma once

#include <cstdint>
#include <functional>
#include <vector>

#include <ATen/core/Tensor.h>

#include "ops/linear/cuda/product_sum.h"
#include "ops/linear/linear.h"

namespace heddle::ops::linear_cuda {

/// Whether one launch of product_sums takes these sums, whose results have `columns`.
bool can_sum(const std::vector<Products>& sums, const std::vector<std::int64_t>& columns);

/// Memory for a result of `columns`, as many rows as a: they begin on 16 bytes, those of fewer than
/// 8 columns too.
at::Tensor result_like(const at::Tensor& a, std::int64_t columns);

/// May put matrices in 8-bit floats, which live as long as it does, in the place of a product's.
using NarrowTerm = std::function<void(const Product& product, cuda::ProductTerm& term)>;

/// The sums of a b^T, or of a b where `b_has_depth_first`, in one launch; see can_sum. `start`,
/// unless undefined, is what each sum begins with.
Tensors sums_of(const std::vector<Products>& sums, const std::vector<std::int64_t>& columns,
                bool b_has_depth_first, const at::Tensor& start = {},
                const NarrowTerm& narrow = {});

}  // namespace heddle::ops::linear_cuda
