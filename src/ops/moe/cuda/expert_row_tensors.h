#pragma once

#include "ops/moe/order.h"

/// Rows of experts as tensors, by the kernels of expert_rows.h and expert_order.h.
namespace heddle::ops::moe_cuda {

const std::int64_t* indices(const at::Tensor& x);
at::Tensor rows_like(const at::Tensor& x, std::int64_t count, std::int64_t width);

/// rows [N,n]: row i is that of token source[i] / k of x [T,n].
at::Tensor gather(const at::Tensor& x, const at::Tensor& source, std::int64_t k);
/// Gathers for an order whose inverse is known.
at::Tensor send(const at::Tensor& x, const at::Tensor& source, const at::Tensor& place,
                std::int64_t k);
/// [T,n]: the sum of the rows of each token. `start`, unless undefined, is added.
at::Tensor sum_onto(const at::Tensor& start, const at::Tensor& rows, const at::Tensor& place,
                    std::int64_t k);
at::Tensor sum(const at::Tensor& rows, const at::Tensor& place, std::int64_t k);

/// Gives what device_moe_order gives, in three launches.
DeviceMoeOrder order_of(const at::Tensor& experts, std::int64_t expert_count);

}  // namespace heddle::ops::moe_cuda
