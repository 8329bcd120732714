#include "ops/moe/moe.h"

#include "ops/autograd.h"
#include "ops/builtin.h"
#include "ops/compute_type.h"
#include "ops/moe/kernels.h"

namespace heddle::ops {
namespace {

void check_change(const char* name, const ExpertLowRank& change, const at::Tensor& weight) {
  if (!change.defined()) return;
  TORCH_CHECK(
      change.down.dim() == 3 && change.up.dim() == 3 && change.down.size(0) == weight.size(0) &&
          change.up.size(0) == weight.size(0) && change.down.size(1) == change.up.size(2) &&
          change.down.size(2) == weight.size(2) && change.up.size(1) == weight.size(1),
      "moe_experts: the change of ", name, " ", weight.sizes(), " is down ", change.down.sizes(),
      " and up ", change.up.sizes(), ", expected [E,r,in] and [E,out,r]");
}

ExpertLowRank detached(const ExpertLowRank& change) {
  return {ops::detached(change.down), ops::detached(change.up)};
}

void check(const MoeExperts::Inputs& in) {
  TORCH_CHECK(in.x.dim() == 2 && in.weights.dim() == 2 && in.weights.size(0) == in.x.size(0) &&
                  in.experts.sizes() == in.weights.sizes() && in.experts.scalar_type() == at::kLong,
              "moe_experts: x ", in.x.sizes(), " must be [T,H], weights ", in.weights.sizes(),
              " and experts ", in.experts.sizes(), " ", in.experts.scalar_type(),
              " [T,k], the experts int64");
  TORCH_CHECK(in.gate_up.dim() == 3 && in.down.dim() == 3 &&
                  in.gate_up.size(0) == in.down.size(0) && in.gate_up.size(2) == in.x.size(1) &&
                  in.down.size(1) == in.x.size(1) && in.gate_up.size(1) == 2 * in.down.size(2),
              "moe_experts: gate_up ", in.gate_up.sizes(), " must be [E,2I,H] and down ",
              in.down.sizes(), " [E,H,I] with H = ", in.x.size(1));
  TORCH_CHECK(!in.assignments || (*in.assignments >= 0 && *in.assignments <= in.experts.numel()),
              "moe_experts: ", in.assignments.value_or(0), " assignments of ", in.experts.sizes());
  check_change("gate_up", in.gate_up_change, in.gate_up);
  check_change("down", in.down_change, in.down);
}

}  // namespace

at::Tensor moe_experts(const KernelTable& kernels, const MoeExperts::Inputs& inputs) {
  return moe_experts_branch(kernels, inputs).first;
}

std::pair<at::Tensor, at::Tensor> moe_experts_branch(const KernelTable& kernels,
                                                     const MoeExperts::Inputs& inputs) {
  check(inputs);
  const MoeExperts::Functions functions = kernels.get<MoeExperts>();
  const Tensors differentiable = {inputs.x,
                                  inputs.weights,
                                  inputs.gate_up,
                                  inputs.down,
                                  inputs.gate_up_change.down,
                                  inputs.gate_up_change.up,
                                  inputs.down_change.down,
                                  inputs.down_change.up};
  const bool keep = needs_gradient(differentiable);
  MoeExperts::Inputs saved{
      detached(inputs.x),           detached(inputs.weights), inputs.experts,
      detached(inputs.gate_up),     detached(inputs.down),    detached(inputs.gate_up_change),
      detached(inputs.down_change), inputs.assignments};
  MoeExperts::Forward result = run_without_gradient([&] { return functions.forward(saved, keep); });
  if (!keep) return {result.y, inputs.x};
  const bool want_weight_gradients = inputs.gate_up.requires_grad() || inputs.down.requires_grad();
  const at::Tensor y = std::move(result.y);
  result.y = at::Tensor();
  const Tensors outputs =
      with_gradient("moe_experts", differentiable, {y, ops::detached(inputs.x)},
                    [functions, saved = std::move(saved), result = std::move(result),
                     want_weight_gradients](const Tensors& grads) -> Tensors {
                      if (!grads[0].defined()) {
                        Tensors none(8);
                        none[0] = grads[1];
                        return none;
                      }
                      const MoeExperts::Gradients g = functions.backward(
                          saved, result, grads[0], want_weight_gradients, grads[1]);
                      return {g.x,
                              g.weights,
                              g.gate_up,
                              g.down,
                              g.gate_up_change.down,
                              g.gate_up_change.up,
                              g.down_change.down,
                              g.down_change.up};
                    });
  return {outputs[0], outputs[1]};
}

void register_moe(Registry& registry) {
  registry.add<MoeRoute>(KernelInfo::reference(),
                         {moe_route_reference::forward, moe_route_reference::backward});
  registry.add<MoeExperts>(
      KernelInfo::cpu("cpu"),
      {moe_experts_cpu::forward, moe_experts_cpu::backward, gather_rows, moe_experts_cpu::sum});
  registry.add<MoeExperts>(KernelInfo::reference(),
                           {moe_experts_reference::forward, moe_experts_reference::backward});
  registry.add<SharedExpertSum>(KernelInfo::reference(), {shared_expert_reference::forward,
                                                          shared_expert_reference::backward});
}

}  // namespace heddle::ops
