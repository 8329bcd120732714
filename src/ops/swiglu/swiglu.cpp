#include "ops/swiglu/swiglu.h"

#include "ops/autograd.h"
#include "ops/builtin.h"
#include "ops/compute_type.h"
#include "ops/swiglu/kernels.h"

namespace heddle::ops {

namespace {

/// Gradients of gate and up, and y.
std::tuple<at::Tensor, at::Tensor, at::Tensor> backward_again(const Swiglu::Functions& functions,
                                                              const at::Tensor& gate,
                                                              const at::Tensor& up,
                                                              const at::Tensor& grad_y) {
  if (functions.backward_again != nullptr) return functions.backward_again(gate, up, grad_y);
  auto [d_gate, d_up] = functions.backward(gate, up, grad_y);
  return {d_gate, d_up, functions.forward(gate, up)};
}

}  // namespace

at::Tensor swiglu(const KernelTable& kernels, const at::Tensor& gate, const at::Tensor& up,
                  OutputAgain again) {
  TORCH_CHECK(
      gate.dim() == 2 && gate.sizes() == up.sizes() && gate.scalar_type() == up.scalar_type(),
      "swiglu: gate ", gate.sizes(), " ", gate.scalar_type(), " and up ", up.sizes(), " ",
      up.scalar_type(), " must be equal [T,F]");
  const Swiglu::Functions functions = kernels.get<Swiglu>();
  at::Tensor y = run_without_gradient([&] { return functions.forward(gate, up); });
  return with_gradient("swiglu", {gate, up}, {y},
                       [functions, gate = detached(gate), up = detached(up),
                        again = std::move(again)](const Tensors& grads) -> Tensors {
                         if (!grads[0].defined()) return {{}, {}};
                         if (!again) {
                           auto [d_gate, d_up] = functions.backward(gate, up, grads[0]);
                           return {d_gate, d_up};
                         }
                         auto [d_gate, d_up, y] = backward_again(functions, gate, up, grads[0]);
                         again(y);
                         return {d_gate, d_up};
                       })[0];
}

void register_swiglu(Registry& registry) {
  swiglu_cuda::add(registry);
  swiglu_npu::add(registry);
  registry.add<Swiglu>({.op = "",
                        .name = "cpu",
                        .device = c10::DeviceType::CPU,
                        .dtypes = cpu_kernel_dtypes(),
                        .is_reference = false,
                        .refuse = {},
                        .on_chip_bytes = {}},
                       {swiglu_cpu::forward, swiglu_cpu::backward});
  registry.add<Swiglu>({.op = "",
                        .name = "reference",
                        .device = {},
                        .dtypes = reference_dtypes(),
                        .is_reference = true,
                        .refuse = {},
                        .on_chip_bytes = {}},
                       {swiglu_reference::forward, swiglu_reference::backward});
}

}  // namespace heddle::ops
