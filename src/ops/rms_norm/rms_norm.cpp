#include "ops/rms_norm/rms_norm.h"

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

/// Tensors that the backward of a norm keeps.
struct Saved {
  RmsNorm::Functions functions;
  at::Tensor input;
  NormWeight weight;
  at::Tensor rstd;
  double eps;

  /// Gradients of the input and of the weight, and y.
  std::tuple<at::Tensor, at::Tensor, at::Tensor> backward_again(const at::Tensor& grad_y,
                                                                const at::Tensor& grad_sum) const {
    if (functions.backward_again != nullptr)
      return functions.backward_again(input, weight, rstd, grad_y, grad_sum);
    auto [dx, dw] = functions.backward(input, weight, rstd, grad_y, grad_sum);
    return {dx, dw, functions.forward(input, {}, weight, eps).y};
  }
};

}  // namespace

at::Tensor rms_norm(const KernelTable& kernels, const at::Tensor& x, const NormWeight& weight,
                    double eps) {
  return rms_norm_branch(kernels, x, weight, eps).first;
}

std::pair<at::Tensor, at::Tensor> rms_norm_branch(const KernelTable& kernels, const at::Tensor& x,
                                                  const NormWeight& weight, double eps,
                                                  OutputAgain again) {
  check(x, weight);
  const RmsNorm::Functions functions = kernels.get<RmsNorm>();
  RmsNorm::Forward result =
      run_without_gradient([&] { return functions.forward(x, {}, weight, eps); });
  if (!needs_gradient({x, weight.value})) return {result.y, x};
  const Tensors outputs =
      with_gradient("rms_norm", {x, weight.value}, {result.y, ops::detached(x)},
                    [saved = Saved{functions, ops::detached(x), detached(weight), result.rstd, eps},
                     again = std::move(again)](const Tensors& grads) -> Tensors {
                      if (!grads[0].defined()) return {grads[1], {}};
                      if (!again) {
                        auto [dx, dw] = saved.functions.backward(saved.input, saved.weight,
                                                                 saved.rstd, grads[0], grads[1]);
                        return {dx, dw};
                      }
                      auto [dx, dw, y] = saved.backward_again(grads[0], grads[1]);
                      again(y);
                      return {dx, dw};
                    });
  return {outputs[0], outputs[1]};
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
  const Tensors outputs =
      with_gradient("add_rms_norm", {x, residual, weight.value}, {result.y, result.sum},
                    [functions, sum = ops::detached(result.sum), weight = detached(weight),
                     rstd = result.rstd](const Tensors& grads) -> Tensors {
                      if (!grads[0].defined()) return {grads[1], grads[1], {}};
                      auto [dx, dw] = functions.backward(sum, weight, rstd, grads[0], grads[1]);
                      return {dx, dx, dw};
                    });
  return {outputs[0], outputs[1]};
}

void register_rms_norm(Registry& registry) {
  registry.add<RmsNorm>(KernelInfo::cpu("cpu"), {rms_norm_cpu::forward, rms_norm_cpu::backward});
  registry.add<RmsNorm>(KernelInfo::reference(),
                        {rms_norm_reference::forward, rms_norm_reference::backward});
}

}  // namespace heddle::ops
