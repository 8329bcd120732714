#include "ops/moe/moe.h"

#include "ops/autograd.h"
#include "ops/builtin.h"
#include "ops/compute_type.h"
#include "ops/moe/kernels.h"

namespace heddle::ops {
namespace {

/// `shared`: the factor that experts may share.
void check_change(const char* name, const ExpertLowRank& change, const at::Tensor& weight,
                  at::Tensor ExpertLowRank::*shared) {
  if (!change.defined()) return;
  const auto is_of_experts = [&](at::Tensor ExpertLowRank::*factor) {
    const std::int64_t count = (change.*factor).size(0);
    return count == weight.size(0) || (count == 1 && factor == shared);
  };
  TORCH_CHECK(
      change.down.dim() == 3 && change.up.dim() == 3 && is_of_experts(&ExpertLowRank::down) &&
          is_of_experts(&ExpertLowRank::up) && change.down.size(1) == change.up.size(2) &&
          change.down.size(2) == weight.size(2) && change.up.size(1) == weight.size(1),
      "moe_experts: the change of ", name, " ", weight.sizes(), " is down ", change.down.sizes(),
      " and up ", change.up.sizes(), ", expected [E,r,in] and [E,out,r], or 1 for E in ",
      shared == &ExpertLowRank::down ? "down" : "up");
}

ExpertLowRank detached(const ExpertLowRank& change) {
  return {ops::detached(change.down), ops::detached(change.up)};
}

/// The factors of all changes, in one order.
Tensors factors_of(const std::vector<ExpertChanges>& changes) {
  Tensors factors;
  for (const ExpertChanges& change : changes) {
    for (const ExpertLowRank* const one : {&change.gate_up, &change.down})
      factors.insert(factors.end(), {one->down, one->up});
  }
  return factors;
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
  std::int64_t tokens = 0;
  for (const ExpertChanges& change : in.changes) {
    check_change("gate_up", change.gate_up, in.gate_up, &ExpertLowRank::down);
    check_change("down", change.down, in.down, &ExpertLowRank::up);
    tokens += change.tokens < 0 ? in.x.size(0) : change.tokens;
  }
  TORCH_CHECK(in.changes.empty() || tokens == in.x.size(0), "moe_experts: changes of ", tokens,
              " tokens, and there are ", in.x.size(0));
  TORCH_CHECK(in.changes.size() < 2 || !in.assignments,
              "moe_experts: changes of several sets while ranks share the experts");
}

}  // namespace

at::Tensor moe_experts(const KernelTable& kernels, const MoeExperts::Inputs& inputs) {
  return moe_experts_branch(kernels, inputs).first;
}

std::pair<at::Tensor, at::Tensor> moe_experts_branch(const KernelTable& kernels,
                                                     const MoeExperts::Inputs& inputs) {
  check(inputs);
  const MoeExperts::Functions functions = kernels.get<MoeExperts>();
  TORCH_CHECK(inputs.changes.size() < 2 || functions.takes_sets,
              "moe_experts: the kernel takes the changes of one set alone");
  Tensors differentiable = {inputs.x, inputs.weights, inputs.gate_up, inputs.down};
  const Tensors factors = factors_of(inputs.changes);
  differentiable.insert(differentiable.end(), factors.begin(), factors.end());
  const bool keep = needs_gradient(differentiable);
  MoeExperts::Inputs saved{detached(inputs.x),       detached(inputs.weights), inputs.experts,
                           detached(inputs.gate_up), detached(inputs.down),    {},
                           inputs.assignments};
  for (const ExpertChanges& change : inputs.changes)
    saved.changes.push_back({detached(change.gate_up), detached(change.down), change.tokens});
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
                        Tensors none(4 + 4 * saved.changes.size());
                        none[0] = grads[1];
                        return none;
                      }
                      const MoeExperts::Gradients g = functions.backward(
                          saved, result, grads[0], want_weight_gradients, grads[1]);
                      Tensors gradients = {g.x, g.weights, g.gate_up, g.down};
                      const Tensors of_factors = factors_of(g.changes);
                      gradients.insert(gradients.end(), of_factors.begin(), of_factors.end());
                      return gradients;
                    });
  return {outputs[0], outputs[1]};
}

void register_moe(Registry& registry) {
  registry.add<MoeRoute>(KernelInfo::reference(),
                         {moe_route_reference::forward, moe_route_reference::backward});
  registry.add<MoeExperts>(
      KernelInfo::cpu("cpu"),
      {moe_experts_cpu::forward, moe_experts_cpu::backward, gather_rows, moe_experts_cpu::sum,
       /*takes_eight_bits=*/false, /*takes_sets=*/true});
  registry.add<MoeExperts>(KernelInfo::reference(),
                           {moe_experts_reference::forward, moe_experts_reference::backward,
                            gather_rows, sum_rows, /*takes_eight_bits=*/false,
                            /*takes_sets=*/true});
  registry.add<SharedExpertSum>(KernelInfo::reference(), {shared_expert_reference::forward,
                                                          shared_expert_reference::backward});
}

}  // namespace heddle::ops
