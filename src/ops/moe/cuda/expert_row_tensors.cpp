#include "ops/moe/cuda/expert_row_tensors.h"

#include <ATen/ops/empty.h>
#include <ATen/ops/empty_like.h>

#include "ops/cuda/tensor.h"
#include "ops/moe/cuda/expert_order.h"
#include "ops/moe/cuda/expert_rows.h"

namespace heddle::ops::moe_cuda {

const std::int64_t* indices(const at::Tensor& x) { return x.const_data_ptr<std::int64_t>(); }

at::Tensor rows_like(const at::Tensor& x, std::int64_t count, std::int64_t width) {
  return at::empty({count, width}, x.options());
}

at::Tensor gather(const at::Tensor& x, const at::Tensor& source, std::int64_t k) {
  const cuda::OnDevice on(x);
  const at::Tensor from = x.contiguous();
  at::Tensor rows = rows_like(x, source.size(0), x.size(1));
  cuda::gather_expert_rows(rows.size(0), rows.size(1), k, from.const_data_ptr(), indices(source),
                           rows.mutable_data_ptr(), on.stream());
  return rows;
}

at::Tensor send(const at::Tensor& x, const at::Tensor& source, const at::Tensor& place,
                std::int64_t k) {
  if (!cuda::can_send_rows(x.size(1))) return gather(x, source, k);
  const cuda::OnDevice on(x);
  const at::Tensor from = x.contiguous();
  at::Tensor rows = rows_like(x, source.size(0), x.size(1));
  cuda::send_expert_rows(rows.size(0), from.size(0), rows.size(1), k, from.const_data_ptr(),
                         indices(place), rows.mutable_data_ptr(), on.stream());
  return rows;
}

at::Tensor sum_onto(const at::Tensor& start, const at::Tensor& rows, const at::Tensor& place,
                    std::int64_t k) {
  const cuda::OnDevice on(rows);
  const at::Tensor from = rows.contiguous(), first = start.defined() ? start.contiguous() : start;
  at::Tensor y = rows_like(rows, place.size(0) / k, rows.size(1));
  cuda::sum_expert_rows(from.size(0), y.size(0), y.size(1), k, from.const_data_ptr(),
                        indices(place), first.defined() ? first.const_data_ptr() : nullptr,
                        y.mutable_data_ptr(), on.stream());
  return y;
}

at::Tensor sum(const at::Tensor& rows, const at::Tensor& place, std::int64_t k) {
  return sum_onto({}, rows, place, k);
}

DeviceMoeOrder order_of(const at::Tensor& experts, std::int64_t expert_count) {
  if (expert_count > cuda::kMostOrderedExperts) return device_moe_order(experts, expert_count);
  const cuda::OnDevice on(experts);
  const at::Tensor flat = experts.contiguous().view({-1});
  const auto ints = flat.options().dtype(at::kInt);
  DeviceMoeOrder order{at::empty_like(flat), at::empty_like(flat), at::empty({expert_count}, ints)};
  at::Tensor counts = at::empty({cuda::order_segments(flat.size(0)), expert_count + 1}, ints);
  cuda::expert_order(
      flat.size(0), expert_count, indices(flat), order.source.mutable_data_ptr<std::int64_t>(),
      order.place.mutable_data_ptr<std::int64_t>(), order.ends.mutable_data_ptr<std::int32_t>(),
      counts.mutable_data_ptr<std::int32_t>(), on.stream());
  return order;
}

}  // namespace heddle::ops::moe_cuda
