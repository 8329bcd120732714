#include "ops/moe/shared_expert.h"

#include <ATen/TensorOperators.h>
#include <ATen/ops/sigmoid_backward.h>
#include <ATen/ops/sum.h>

#include "ops/autograd.h"
#include "ops/gates.h"
#include "ops/moe/kernels.h"

namespace heddle::ops {

namespace shared_expert_reference {

at::Tensor forward(const at::Tensor& routed, const at::Tensor& shared, const at::Tensor& gate,
                   const at::Tensor& residual) {
  const at::Tensor y = routed + shared * ops::sigmoid(gate);
  return residual.defined() ? residual + y : y;
}

std::pair<at::Tensor, at::Tensor> backward(const at::Tensor& shared, const at::Tensor& gate,
                                           const at::Tensor& grad_y) {
  const at::Tensor s = ops::sigmoid(gate);
  return {grad_y * s, at::sigmoid_backward(at::sum(grad_y * shared, {1}, /*keepdim=*/true), s)};
}

}  // namespace shared_expert_reference

at::Tensor shared_expert_sum(const KernelTable& kernels, const at::Tensor& routed,
                             const at::Tensor& shared, const at::Tensor& gate,
                             const at::Tensor& residual) {
  TORCH_CHECK(routed.dim() == 2 && routed.sizes() == shared.sizes() && gate.dim() == 2 &&
                  gate.size(0) == routed.size(0) && gate.size(1) == 1,
              "shared_expert_sum: routed ", routed.sizes(), " and shared ", shared.sizes(),
              " must be equal [T,H], gate ", gate.sizes(), " [T,1]");
  TORCH_CHECK(!residual.defined() || residual.sizes() == routed.sizes(),
              "shared_expert_sum: residual ",
              residual.defined() ? residual.sizes() : routed.sizes(), " must be [T,H] as routed ",
              routed.sizes());
  const SharedExpertSum::Functions functions = kernels.get<SharedExpertSum>();
  at::Tensor y =
      run_without_gradient([&] { return functions.forward(routed, shared, gate, residual); });
  return with_gradient("shared_expert_sum", {routed, shared, gate, residual}, {y},
                       [functions, shared = detached(shared),
                        gate = detached(gate)](const Tensors& grads) -> Tensors {
                         if (!grads[0].defined()) return Tensors(4);
                         auto [d_shared, d_gate] = functions.backward(shared, gate, grads[0]);
                         return {grads[0], d_shared, d_gate, grads[0]};
                       })[0];
}

}  // namespace heddle::ops
