#include "ops/rms_norm/rms_norm.h"

#include <ATen/TensorOperators.h>

#include <utility>

#include "ops/autograd.h"
#include "ops/builtin.h"
#include "ops/compute_type.h"
#include "ops/rms_norm/kernels.h"

namespace heddle::ops {
namespace {

void check(const at::Tensor& x, const NormWeight& weight) {
  TORCH_CHECK(x.dim() >= 1 && weight.value.dim() == 1 && weight.value.size(0) == x.size(-1),
              "rms_norm: x ", x.sizes(), " and weight ", weight.value.sizes(),
              " must agree in the last dimension");
}

NormWeight detached(const NormWeight& weight) {
  return {ops::detached(weight.value), weight.offset};
}

/// The kernel's gradients, in as many passes as it needs.
RmsNorm::Gradients gradients(const RmsNorm::Functions& functions, RmsNorm::Backward in,
                             double eps) {
  if (functions.does_all_in_one_pass) return functions.backward(in);
  if (in.grad_y_2.defined()) in.grad_y = in.grad_y + std::exchange(in.grad_y_2, at::Tensor());
  const bool wants_y = std::exchange(in.wants_y, false);
  RmsNorm::Gradients result = functions.backward(in);
  if (wants_y) result.y = functions.forward(in.input, {}, in.weight, eps).y;
  return result;
}

}  // namespace

at::Tensor rms_norm(const KernelTable& kernels, const at::Tensor& x, const NormWeight& weight,
                    double eps) {
  return rms_norm_branch(kernels, x, weight, eps).first;
}

std::pair<at::Tensor, at::Tensor> rms_norm_branch(const KernelTable& kernels, const at::Tensor& x,
                                                  const NormWeight& weight, double eps,
                                                  OutputAgain again) {
  const NormBranches branches = rms_norm_branches(kernels, x, weight, eps, std::move(again));
  return {branches.y, branches.stream};
}

NormBranches rms_norm_branches(const KernelTable& kernels, const at::Tensor& x,
                               const NormWeight& weight, double eps, OutputAgain again) {
  check(x, weight);
  const RmsNorm::Functions functions = kernels.get<RmsNorm>();
  RmsNorm::Forward result =
      run_without_gradient([&] { return functions.forward(x, {}, weight, eps); });
  if (!needs_gradient({x, weight.value})) return {result.y, result.y, x};
  RmsNorm::Backward saved{ops::detached(x), detached(weight), result.rstd, {}};
  saved.wants_weight = weight.value.requires_grad();
  saved.wants_y = again != nullptr;
  const Tensors outputs = with_gradient(
      "rms_norm", {x, weight.value}, {result.y, ops::detached(result.y), ops::detached(x)},
      [functions, saved = std::move(saved), eps,
       again = std::move(again)](const Tensors& grads) -> Tensors {
        if (!grads[0].defined() && !grads[1].defined()) return {grads[2], {}};
        RmsNorm::Backward in = saved;
        in.grad_y = grads[0].defined() ? grads[0] : grads[1];
        if (grads[0].defined()) in.grad_y_2 = grads[1];
        in.grad_sum = grads[2];
        const RmsNorm::Gradients g = gradients(functions, std::move(in), eps);
        if (again) again(g.y);
        return {g.input, g.weight};
      });
  return {outputs[0], outputs[1], outputs[2]};
}

std::pair<at::Tensor, at::Tensor> add_rms_norm(const KernelTable& kernels, const at::Tensor& x,
                                               const at::Tensor& residual, const NormWeight& weight,
                                               double eps) {
  check(x, weight);
  TORCH_CHECK(residual.sizes() == x.sizes() && residual.scalar_type() == x.scalar_type(),
              "add_rms_norm: residual ", residual.sizes(), " ", residual.scalar_type(),
              " must equal x ", x.sizes(), " ", x.scalar_type());
  const RmsNorm::Functions functions = kernels.get<RmsNorm>();
  RmsNorm::Forward result =
      run_without_gradient([&] { return functions.forward(x, residual, weight, eps); });
  if (!needs_gradient({x, residual, weight.value})) return {result.y, result.sum};
  const Tensors outputs = with_gradient(
      "add_rms_norm", {x, residual, weight.value}, {result.y, result.sum},
      [functions, sum = ops::detached(result.sum), weight = detached(weight), rstd = result.rstd,
       wants_weight = weight.value.requires_grad()](const Tensors& grads) -> Tensors {
        if (!grads[0].defined()) return {grads[1], grads[1], {}};
        RmsNorm::Backward in{sum, weight, rstd, grads[0], {}, grads[1]};
        in.wants_weight = wants_weight;
        const RmsNorm::Gradients g = functions.backward(in);
        return {g.input, g.input, g.weight};
      });
  return {outputs[0], outputs[1]};
}

void register_rms_norm(Registry& registry) {
  registry.add<RmsNorm>(KernelInfo::cpu("cpu"), {rms_norm_cpu::forward, rms_norm_cpu::backward});
  registry.add<RmsNorm>(KernelInfo::reference(),
                        {rms_norm_reference::forward, rms_norm_reference::backward});
}

}  // namespace heddle::ops
