#include <ATen/TensorOperators.h>
#include <ATen/ops/index_select.h>
#include <ATen/ops/sum.h>

#include "ops/autograd.h"
#include "ops/compute_type.h"
#include "ops/moe/kernels.h"

namespace heddle::ops {

at::Tensor combine_rows(const at::Tensor& rows, const at::Tensor& weights, const MoeOrder& order) {
  const c10::ScalarType type = compute_type(rows);
  at::Tensor by_token = at::index_select(rows, 0, order.place)
                            .view({rows.size(0) / order.top_k, order.top_k, rows.size(1)});
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
          at::index_select(at::sum(dy * rows, {1}), 0, order.place)
              .view(weights.sizes())
              .to(weights.scalar_type())};
}

at::Tensor moe_permute(const at::Tensor& x, const MoeOrder& order) {
  const at::Tensor rows = run_without_gradient([&] { return at::index_select(x, 0, order.token); });
  return with_gradient("moe_permute", {x}, {rows}, [order](const Tensors& grads) -> Tensors {
    if (!grads[0].defined()) return {{}};
    return {combine_rows(grads[0], {}, order)};
  })[0];
}

at::Tensor moe_permute_weights(const at::Tensor& weights, const MoeOrder& order) {
  // Each assignment as a token of one number.
  MoeOrder single = order;
  single.token = order.source;
  single.top_k = 1;
  return moe_permute(weights.reshape({-1, 1}), single);
}

at::Tensor moe_unpermute(const at::Tensor& rows, const MoeOrder& order) {
  const at::Tensor y = run_without_gradient([&] { return combine_rows(rows, {}, order); });
  return with_gradient("moe_unpermute", {rows}, {y}, [order](const Tensors& grads) -> Tensors {
    if (!grads[0].defined()) return {{}};
    return {at::index_select(grads[0], 0, order.token)};
  })[0];
}

}  // namespace heddle::ops
