#include "ops/collectives.h"

#include <ATen/ops/empty.h>

#include <numeric>
#include <utility>

#include "ops/autograd.h"

namespace heddle::ops {
namespace {

std::vector<std::int64_t> with_rows(const at::Tensor& x, std::int64_t rows) {
  std::vector<std::int64_t> shape = x.sizes().vec();
  shape[0] = rows;
  return shape;
}

at::Tensor summed(const at::Tensor& x, const comm::Group& group) {
  at::Tensor y = detached(x).clone(at::MemoryFormat::Contiguous);
  group.all_reduce_sum(y);
  return y;
}

at::Tensor gathered(const at::Tensor& x, const comm::Group& group) {
  at::Tensor y = at::empty(with_rows(x, group.size() * x.size(0)), x.options());
  group.all_gather(y, detached(x).contiguous());
  return y;
}

at::Tensor scattered(const at::Tensor& x, const comm::Group& group) {
  at::Tensor y = at::empty(with_rows(x, own_rows(x.size(0), group).count), x.options());
  group.reduce_scatter_sum(y, detached(x).contiguous());
  return y;
}

/// Room for the rows that are received in exchange for some of x.
at::Tensor room_for(const at::Tensor& x, const std::vector<std::int64_t>& output_rows) {
  const std::int64_t rows =
      std::accumulate(output_rows.begin(), output_rows.end(), std::int64_t{0});
  return at::empty(with_rows(x, rows), x.options());
}

at::Tensor exchanged(const at::Tensor& x, const std::vector<std::int64_t>& input_rows,
                     const std::vector<std::int64_t>& output_rows, const comm::Group& group) {
  at::Tensor y = room_for(x, output_rows);
  group.all_to_all(y, output_rows, detached(x).contiguous(), input_rows);
  return y;
}

/// An operator of one input whose forward and backward are collectives.
template <class Forward, class Backward>
at::Tensor one_input(const char* name, const at::Tensor& x, Forward&& forward,
                     Backward&& backward) {
  at::Tensor y = run_without_gradient([&] { return forward(x); });
  return with_gradient(name, {x}, {y}, [backward](const Tensors& grads) -> Tensors {
    if (!grads[0].defined()) return {{}};
    return {backward(grads[0])};
  })[0];
}

}  // namespace

Rows rows_of_member(std::int64_t total, std::int64_t rank, const comm::Group& group) {
  TORCH_CHECK(total % group.size() == 0, total, " rows do not divide by the ", group.size(),
              " ranks of group ", group.name());
  const std::int64_t count = total / group.size();
  return {rank * count, count};
}

at::Tensor reduce_from_group(const at::Tensor& x, const comm::Group& group) {
  if (group.size() == 1) return x;
  return one_input(
      "reduce_from_group", x, [&](const at::Tensor& t) { return summed(t, group); },
      [](const at::Tensor& dy) { return dy; });
}

at::Tensor all_gather_rows(const at::Tensor& x, const comm::Group& group) {
  if (group.size() == 1) return x;
  return one_input(
      "all_gather_rows", x, [&](const at::Tensor& t) { return gathered(t, group); },
      [group](const at::Tensor& dy) { return scattered(dy, group); });
}

at::Tensor reduce_scatter_rows(const at::Tensor& x, const comm::Group& group) {
  if (group.size() == 1) return x;
  return one_input(
      "reduce_scatter_rows", x, [&](const at::Tensor& t) { return scattered(t, group); },
      [group](const at::Tensor& dy) { return gathered(dy, group); });
}

at::Tensor all_to_all_rows(const at::Tensor& x, const std::vector<std::int64_t>& input_rows,
                           const std::vector<std::int64_t>& output_rows, const comm::Group& group) {
  if (group.size() == 1) return x;
  return one_input(
      "all_to_all_rows", x,
      [&](const at::Tensor& t) { return exchanged(t, input_rows, output_rows, group); },
      [group, input_rows, output_rows](const at::Tensor& dy) {
        return exchanged(dy, output_rows, input_rows, group);
      });
}

RowExchange::RowExchange(const at::Tensor& x, std::vector<std::int64_t> input_rows,
                         std::vector<std::int64_t> output_rows, const comm::Group& group)
    : input_rows_(std::move(input_rows)),
      output_rows_(std::move(output_rows)),
      group_(group),
      travel_(std::make_shared<Travel>()) {
  run_without_gradient([&] {
    travel_->sent = detached(x).contiguous();
    travel_->received = room_for(x, output_rows_);
    travel_->pending =
        group_.all_to_all_async(travel_->received, output_rows_, travel_->sent, input_rows_);
    return at::Tensor();
  });
  rows_ = with_gradient("start_row_exchange", {x}, {detached(travel_->received)},
                        [travel = travel_](const Tensors& grads) -> Tensors {
                          if (!grads[0].defined()) return {{}};
                          travel->pending.wait();
                          travel->sent = at::Tensor();
                          return {std::exchange(travel->received, at::Tensor())};
                        })[0];
}

at::Tensor RowExchange::wait() {
  travel_->pending.wait();
  *travel_ = {};
  return with_gradient("end_row_exchange", {rows_}, {detached(rows_)},
                       [travel = travel_, to = input_rows_, from = output_rows_,
                        group = group_](const Tensors& grads) -> Tensors {
                         if (!grads[0].defined()) return {{}};
                         travel->sent = grads[0].contiguous();
                         travel->received = room_for(travel->sent, to);
                         travel->pending =
                             group.all_to_all_async(travel->received, to, travel->sent, from);
                         // A gradient of the right shape: the other node hands out the received.
                         return {travel->sent};
                       })[0];
}

}  // namespace heddle::ops
