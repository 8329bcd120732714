#include "nn/tensor_parallel.h"

#include <ATen/TensorOperators.h>
#include <ATen/ops/empty.h>

#include <memory>
#include <vector>

#include "ops/autograd.h"
#include "ops/collectives.h"

namespace heddle::nn {
namespace {

/// The ranks' rows. Their gradients' sum is on its way to the ranks while `postponed` runs.
at::Tensor enter(const at::Tensor& x, const comm::Group& group,
                 const std::shared_ptr<PostponedWork>& postponed) {
  const at::Tensor rows = ops::run_without_gradient([&] { return ops::all_gather_rows(x, group); });
  return ops::with_gradient("enter_tensor_parallel", {x}, {rows},
                            [group, postponed](const ops::Tensors& grads) -> ops::Tensors {
                              if (!grads[0].defined()) return {{}};
                              const at::Tensor partial = grads[0].contiguous();
                              std::vector<std::int64_t> sizes = partial.sizes().vec();
                              sizes[0] = ops::own_rows(partial.size(0), group).count;
                              at::Tensor gradient = at::empty(sizes, partial.options());
                              comm::Pending sum = group.reduce_scatter_sum_async(gradient, partial);
                              postponed->run();
                              sum.wait();
                              return {gradient};
                            })[0];
}

/// This rank's rows of the sum of the partial products.
at::Tensor leave(const at::Tensor& partial, const comm::Group& group, bool value_unused) {
  if (!value_unused) return ops::reduce_scatter_rows(partial, group);
  const at::Tensor y = at::empty({ops::own_rows(partial.size(0), group).count, partial.size(1)},
                                 partial.options().requires_grad(false));
  return ops::with_gradient("leave_tensor_parallel", {partial}, {y},
                            [group](const ops::Tensors& grads) -> ops::Tensors {
                              if (!grads[0].defined()) return {{}};
                              return {ops::all_gather_rows(grads[0], group)};
                            })[0];
}

}  // namespace

at::Tensor add_to_residual(const at::Tensor& residual, const at::Tensor& y, bool value_unused) {
  if (!value_unused) return residual + y;
  return ops::with_gradient("sum", {residual, y}, {ops::detached(y)},
                            [](const ops::Tensors& grads) {
                              return ops::Tensors{grads[0], grads[0]};
                            })[0];
}

at::Tensor run_tensor_parallel(
    const LinearInput& x, const Pass& pass, const at::Tensor& residual,
    const std::function<at::Tensor(const LinearInput& x, const at::Tensor& residual)>& part,
    bool value_unused) {
  if (pass.tensor_group == nullptr) return part(x, residual);
  const comm::Group& group = *pass.tensor_group;
  const auto postponed = std::make_shared<PostponedWork>();
  LinearInput rows(enter(x.value, group, postponed));
  rows.postponed = postponed;
  const at::Tensor sum = leave(part(rows, {}), group, value_unused);
  return residual.defined() ? add_to_residual(residual, sum, value_unused) : sum;
}

}  // namespace heddle::nn
