#include <ATen/TensorOperators.h>
#include <ATen/ops/cat.h>
#include <ATen/ops/div.h>
#include <ATen/ops/index_select.h>
#include <ATen/ops/sum.h>
#include <ATen/ops/zeros.h>

#include "ops/compute_type.h"
#include "ops/moe/kernels.h"

namespace heddle::ops {
namespace {

/// The row of each assignment [T x k, ...]; zeros for those of no expert.
at::Tensor rows_of_assignments(const at::Tensor& rows, const at::Tensor& place) {
  if (rows.size(0) == place.size(0)) return at::index_select(rows, 0, place);
  std::vector<std::int64_t> one = rows.sizes().vec();
  one[0] = 1;
  return at::index_select(at::cat({rows, at::zeros(one, rows.options())}), 0,
                          place.clamp_max(rows.size(0)));
}

}  // namespace

at::Tensor combine_rows(const at::Tensor& rows, const at::Tensor& weights, const at::Tensor& place,
                        std::int64_t k) {
  const c10::ScalarType type = compute_type(rows);
  at::Tensor by_token = rows_of_assignments(rows, place).view({place.size(0) / k, k, rows.size(1)});
  if (weights.defined()) by_token = by_token.to(type) * weights.to(type).unsqueeze(-1);
  return at::sum(by_token, {1}, /*keepdim=*/false, type).to(rows.scalar_type());
}

CombineGradients combine_rows_backward(const at::Tensor& rows, const at::Tensor& weights,
                                       const MoeOrder& order, const at::Tensor& grad_y) {
  const c10::ScalarType type = compute_type(rows);
  const at::Tensor dy = at::index_select(grad_y, 0, order.token).to(type);
  const at::Tensor row_weight =
      at::index_select(weights.reshape({-1}), 0, order.source).to(type).unsqueeze(1);
  return {(dy * row_weight).to(rows.scalar_type()),
          rows_of_assignments(at::sum(dy * rows, {1}), order.place)
              .view(weights.sizes())
              .to(weights.scalar_type())};
}

at::Tensor gather_rows(const at::Tensor& x, const at::Tensor& source, std::int64_t k) {
  return at::index_select(x, 0, at::div(source, k, "floor"));
}

at::Tensor sum_rows(const at::Tensor& rows, const at::Tensor& place, std::int64_t k) {
  return combine_rows(rows, {}, place, k);
}

}  // namespace heddle::ops
