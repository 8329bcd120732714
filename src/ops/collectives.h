#pragma once

#include <algorithm>
#include <cstdint>
#include <memory>
#include <vector>

#include <ATen/core/Tensor.h>

#include "comm/group.h"

/// Collectives that autograd can pass through. The loss is the sum of what the ranks compute, each
/// rank's part from its own output; so the gradient of a gather is a sum, and the other way round.
/// In a group of one rank all of them return their input.
namespace heddle::ops {

/// A run of rows.
struct Rows {
  std::int64_t first = 0, count = 0;
};
/// How many of them are among the first `real` rows of all.
inline std::int64_t real_rows(const Rows& rows, std::int64_t real) {
  return std::clamp<std::int64_t>(real - rows.first, 0, rows.count);
}
/// Rows of member `rank` where every member has as many of `total`. TORCH_CHECKs that the size
/// divides it.
Rows rows_of_member(std::int64_t total, std::int64_t rank, const comm::Group& group);
inline Rows own_rows(std::int64_t total, const comm::Group& group) {
  return rows_of_member(total, group.rank(), group);
}

/// y = sum of the ranks' x; the gradient is each rank's own, since all go on with the same y.
at::Tensor reduce_from_group(const at::Tensor& x, const comm::Group& group);
/// y [size * T, ...] = the ranks' x [T, ...] in order; the gradient is reduce-scattered.
at::Tensor all_gather_rows(const at::Tensor& x, const comm::Group& group);
/// y [T / size, ...] = this rank's rows of the sum of the ranks' x [T, ...]; the gradient is
/// gathered. TORCH_CHECKs that the size divides T.
at::Tensor reduce_scatter_rows(const at::Tensor& x, const comm::Group& group);
/// Sends input_rows[r] rows of x to rank r and receives output_rows[r] from it; the gradient goes
/// the way back.
at::Tensor all_to_all_rows(const at::Tensor& x, const std::vector<std::int64_t>& input_rows,
                           const std::vector<std::int64_t>& output_rows, const comm::Group& group);

/// all_to_all_rows in two steps. What is computed between them runs beside the exchange, and
/// backward what belongs to that beside the exchange of the gradient: autograd takes operators in
/// the reverse of their order.
class RowExchange {
 public:
  RowExchange(const at::Tensor& x, std::vector<std::int64_t> input_rows,
              std::vector<std::int64_t> output_rows, const comm::Group& group);
  /// The rows that were received. Once.
  at::Tensor wait();

 private:
  /// An exchange under way, forward or backward.
  struct Travel {
    comm::Pending pending;
    at::Tensor sent, received;
  };
  std::vector<std::int64_t> input_rows_, output_rows_;
  comm::Group group_;
  std::shared_ptr<Travel> travel_;
  at::Tensor rows_;
};

}  // namespace heddle::ops
