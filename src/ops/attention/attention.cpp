#include "ops/attention/attention.h"

#include <ATen/ops/empty_like.h>

#include <cmath>
#include <memory>

#include "ops/attention/kernels.h"
#include "ops/autograd.h"
#include "ops/builtin.h"
#include "ops/compute_type.h"
#include "ops/gated_product.h"

namespace heddle::ops {

double attention_scale(const Attention::Inputs& inputs) {
  return inputs.scale != 0 ? inputs.scale : 1 / std::sqrt(static_cast<double>(inputs.q.size(2)));
}

namespace {

void check(const Attention::Inputs& in) {
  TORCH_CHECK(in.q.dim() == 3 && in.k.dim() == 3 && in.k.sizes() == in.v.sizes() &&
                  in.q.size(2) == in.k.size(2),
              "attention: q ", in.q.sizes(), " must be [Tq,Hq,D], k ", in.k.sizes(), " and v ",
              in.v.sizes(), " [Tk,Hkv,D]");
  TORCH_CHECK(in.k.size(1) > 0 && in.q.size(1) % in.k.size(1) == 0, "attention: ", in.q.size(1),
              " query heads are no multiple of ", in.k.size(1), " KV heads");
  TORCH_CHECK(in.q_sequences.count() == in.k_sequences.count(),
              "attention: ", in.q_sequences.count(), " query sequences but ",
              in.k_sequences.count(), " key sequences");
  TORCH_CHECK(in.q_sequences.total() == in.q.size(0) && in.k_sequences.total() == in.k.size(0),
              "attention: cu_seqlens end at ", in.q_sequences.total(), " and ",
              in.k_sequences.total(), ", but q has ", in.q.size(0), " and k ", in.k.size(0),
              " tokens");
  TORCH_CHECK(in.q.scalar_type() == in.k.scalar_type() && in.q.scalar_type() == in.v.scalar_type(),
              "attention: q ", in.q.scalar_type(), ", k ", in.k.scalar_type(), " and v ",
              in.v.scalar_type(), " must have one dtype");
}

}  // namespace

at::Tensor attention(const KernelTable& kernels, const Attention::Inputs& inputs) {
  check(inputs);
  const Attention::Functions functions = kernels.get<Attention>();
  const Tensors differentiable = {inputs.q, inputs.k, inputs.v};
  const bool keep = needs_gradient(differentiable);
  Attention::Forward result = run_without_gradient([&] { return functions.forward(inputs, keep); });
  if (!keep) return result.o;
  Attention::Inputs saved_inputs = inputs;
  saved_inputs.q = detached(inputs.q);
  saved_inputs.k = detached(inputs.k);
  saved_inputs.v = detached(inputs.v);
  const at::Tensor o = result.o;
  result.o = detached(result.o);
  return with_gradient("attention", differentiable, {o},
                       [functions, saved_inputs = std::move(saved_inputs),
                        result = std::move(result)](const Tensors& grads) -> Tensors {
                         if (!grads[0].defined()) return {{}, {}, {}};
                         Attention::Gradients g =
                             functions.backward(saved_inputs, result, grads[0]);
                         return {g.q, g.k, g.v};
                       })[0];
}

at::Tensor output_gate(const KernelTable& kernels, const at::Tensor& x, const at::Tensor& gate,
                       OutputAgain again, const std::shared_ptr<GradientHalves>& halves) {
  TORCH_CHECK(x.sizes() == gate.sizes() && x.scalar_type() == gate.scalar_type(), "output_gate: x ",
              x.sizes(), " ", x.scalar_type(), " and gate ", gate.sizes(), " ", gate.scalar_type(),
              " must be equal [T,n,D]");
  const OutputGate::Functions& functions = kernels.get<OutputGate>();
  if (!halves || functions.backward_into == nullptr)
    return gated_product("output_gate", functions, x, gate, std::move(again));
  const at::Tensor y = run_without_gradient([&] { return functions.forward(x, gate); });
  return with_gradient("output_gate", {x, gate}, {y},
                       [backward = functions.backward_into, x = detached(x), gate = detached(gate),
                        halves, again = std::move(again)](const Tensors& grads) -> Tensors {
                         if (!grads[0].defined()) return {{}, {}};
                         const at::Tensor d_gate = halves->half(1, gate),
                                          y = again ? at::empty_like(x) : at::Tensor(),
                                          dx = backward(x, gate, grads[0], d_gate, y);
                         if (again) again(y);
                         return {dx, d_gate};
                       })[0];
}

void register_attention(Registry& registry) {
  registry.add<Attention>(KernelInfo::cpu("cpu"),
                          {attention_cpu::forward, attention_cpu::backward});
  registry.add<Attention>(KernelInfo::reference(),
                          {attention_reference::forward, attention_reference::backward});
  register_attention_decode(registry);
  registry.add<OutputGate>(KernelInfo::cpu("cpu"),
                           {output_gate_cpu::forward, output_gate_cpu::backward});
  registry.add<OutputGate>(KernelInfo::reference(),
                           {output_gate_reference::forward, output_gate_reference::backward});
}

}  // namespace heddle::ops
