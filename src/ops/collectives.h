#pragma once

#include <cstdint>
#include <vector>

#include <ATen/core/Tensor.h>

#include "comm/group.h"

/// Collectives that autograd can pass through. The loss is the sum of what the ranks compute, each
/// rank's part from its own output; so the gradient of a gather is a sum, and the other way round.
/// In a group of one rank all of them return their input.
namespace heddle::ops {

/// y is x; the gradient is the sum over the group. In front of what each rank computes in its own
/// way from the same x.
at::Tensor copy_to_group(const at::Tensor& x, const comm::Group& group);
/// y = sum of the ranks' x; the gradient is each rank's own, since all go on with the same y.
at::Tensor reduce_from_group(const at::Tensor& x, const comm::Group& group);
/// y [size * T, ...] = the ranks' x [T, ...] in order; the gradient is reduce-scattered.
at::Tensor all_gather_rows(const at::Tensor& x, const comm::Group& group);
/// y [T / size, ...] = this rank's rows of the sum of the ranks' x [T, ...]; the gradient is
/// gathered. TORCH_CHECKs that the size divides T.
at::Tensor reduce_scatter_rows(const at::Tensor& x, const comm::Group& group);
/// y = this rank's rows of x [T, ...], which all ranks have alike: runs of ceil(T / size), the last
/// ones shorter or empty. The gradient is gathered, so that every rank has all of it.
at::Tensor split_rows(const at::Tensor& x, const comm::Group& group);
/// y [T, ...] = the ranks' rows as split_rows deals them. All go on with the same y, so the
/// gradient is that of each rank's rows.
at::Tensor join_rows(const at::Tensor& x, std::int64_t T, const comm::Group& group);
/// Sends input_rows[r] rows of x to rank r and receives output_rows[r] from it; the gradient goes
/// the way back.
at::Tensor all_to_all_rows(const at::Tensor& x, const std::vector<std::int64_t>& input_rows,
                           const std::vector<std::int64_t>& output_rows, const comm::Group& group);

}  // namespace heddle::ops
