#include "ops/causal_conv1d/causal_conv1d.h"

#include "ops/autograd.h"
#include "ops/builtin.h"
#include "ops/causal_conv1d/cpu/causal_conv1d.h"
#include "ops/causal_conv1d/kernels.h"
#include "ops/compute_type.h"

namespace heddle::ops {

void check_conv(const char* op, const at::Tensor& x, const at::Tensor& weight) {
  TORCH_CHECK(x.dim() == 2 && weight.dim() == 2 && weight.size(0) == x.size(1) &&
                  weight.size(1) >= 2 && weight.size(1) <= 8,
              op, ": x ", x.sizes(), " must be [T,C] and weight ", weight.sizes(),
              " [C,W] with 2 <= W <= 8");
  TORCH_CHECK(x.stride(1) == 1 || x.size(1) == 1 || x.numel() == 0, op,
              ": the channels of a token must be contiguous, strides of x are ", x.strides());
}

CausalConv1dResult causal_conv1d(const KernelTable& kernels, const CausalConv1d::Inputs& in) {
  check_conv("causal_conv1d", in.x, in.weight);
  const std::int64_t S = in.sequences.count(), C = in.x.size(1), W = in.weight.size(1);
  TORCH_CHECK(in.sequences.total() == in.x.size(0), "causal_conv1d: cu_seqlens ends at ",
              in.sequences.total(), ", x has ", in.x.size(0), " tokens");
  if (in.initial_state.defined()) {
    const std::vector<std::int64_t> expected{S, C, W - 1};
    TORCH_CHECK(in.initial_state.sizes() == at::IntArrayRef(expected) &&
                    in.initial_state.scalar_type() == in.x.scalar_type(),
                "causal_conv1d: initial_state ", in.initial_state.sizes(), " ",
                in.initial_state.scalar_type(), " must be [S,C,W-1] = ", at::IntArrayRef(expected),
                " ", in.x.scalar_type());
  }
  const CausalConv1d::Functions functions = kernels.get<CausalConv1d>();
  CausalConv1d::Inputs saved{detached(in.x), detached(in.weight), detached(in.initial_state),
                             in.sequences,   in.want_final_state, in.weight.requires_grad()};
  auto [y, final_state] = run_without_gradient([&] { return functions.forward(saved); });
  const Tensors inputs{in.x, in.weight, in.initial_state};
  if (!needs_gradient(inputs)) return {y, final_state};
  const Tensors out =
      with_gradient("causal_conv1d", inputs, {y, final_state},
                    [functions, saved = std::move(saved)](const Tensors& grads) -> Tensors {
                      if (!grads[0].defined() && !grads[1].defined()) return Tensors(3);
                      CausalConv1d::Gradients d = functions.backward(saved, grads[0], grads[1]);
                      return {d.x, d.weight, d.initial_state};
                    });
  return {out[0], out[1]};
}

void register_causal_conv1d(Registry& registry) {
  registry.add<CausalConv1d>(KernelInfo::cpu("cpu.vector"),
                             {conv_cpu::forward, conv_cpu::backward});
  registry.add<CausalConv1d>(KernelInfo::reference(),
                             {causal_conv1d_reference::forward, causal_conv1d_reference::backward});
  register_conv_decode(registry);
}

}  // namespace heddle::ops
