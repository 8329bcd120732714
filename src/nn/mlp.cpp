#include "nn/mlp.h"

#include <ATen/TensorOperators.h>
#include <ATen/ops/sigmoid.h>

#include <utility>

#include "nn/tensor_parallel.h"
#include "ops/autograd.h"
#include "ops/collectives.h"
#include "ops/moe/expert_parallel.h"
#include "ops/moe/moe.h"
#include "ops/swiglu/swiglu.h"

namespace heddle::nn {

using comm::Dim;

Mlp::Mlp(const std::string& prefix, std::int64_t hidden_size, std::int64_t intermediate_size)
    : gate_proj_(prefix + "gate_proj.weight", intermediate_size, hidden_size, {{Dim::kTp, 0, {}}}),
      up_proj_(prefix + "up_proj.weight", intermediate_size, hidden_size, {{Dim::kTp, 0, {}}}),
      down_proj_(prefix + "down_proj.weight", hidden_size, intermediate_size, {{Dim::kTp, 1, {}}}) {
}

at::Tensor Mlp::share(const LinearInput& x, const BlockInputs& inputs, const at::Tensor& residual,
                      bool value_unused) {
  const std::vector<at::Tensor> gate_up = forward_all(*inputs.kernels, x, {&gate_proj_, &up_proj_});
  const auto gated = [&](const ops::OutputAgain& again) {
    return ops::swiglu(*inputs.kernels, gate_up[0], gate_up[1], again);
  };
  LinearInput input = inputs.recompute_elementwise ? LinearInput::made_again(gated) : gated({});
  input.outputs_unused = value_unused;
  input.residual = residual;
  return down_proj_.forward(*inputs.kernels, input);
}

at::Tensor Mlp::forward(const LinearInput& x, const BlockInputs& inputs, const at::Tensor& residual,
                        bool value_unused) {
  return run_tensor_parallel(
      x, inputs, residual,
      [&](const LinearInput& rows, const at::Tensor& own_residual) {
        return share(rows, inputs, own_residual, value_unused);
      },
      value_unused);
}

void Mlp::visit_parameters(const std::function<void(Parameter&)>& visit) {
  visit_linears([&](Linear& linear) { visit(linear.weight()); });
}

void Mlp::visit_linears(const std::function<void(Linear&)>& visit) {
  for (Linear* linear : {&gate_proj_, &up_proj_, &down_proj_}) visit(*linear);
}

Moe::Moe(const std::string& prefix, const MoeDims& dims)
    : dims_(dims),
      gate_(prefix + "gate.weight", dims.num_experts, dims.hidden_size),
      gate_up_(prefix + "experts.gate_up_proj", dims.num_experts, 2 * dims.moe_intermediate_size,
               dims.hidden_size),
      down_(prefix + "experts.down_proj", dims.num_experts, dims.hidden_size,
            dims.moe_intermediate_size),
      shared_expert_(prefix + "shared_expert.", dims.hidden_size,
                     dims.shared_expert_intermediate_size),
      shared_expert_gate_(prefix + "shared_expert_gate.weight", 1, dims.hidden_size) {
  gate_.weight().set_partial_gradient();
  shared_expert_gate_.weight().set_partial_gradient();
}

BlockOutput Moe::forward(const at::Tensor& x, const BlockInputs& inputs, bool want_auxiliary_loss) {
  const ops::MoeRouting routing =
      ops::moe_route(*inputs.kernels, gate_.forward(*inputs.kernels, x), dims_.num_experts_per_tok,
                     dims_.normalize_top_k, inputs.experts);
  at::Tensor shared;
  const at::Tensor chosen = routed(x, routing, inputs, [&] {
    shared = shared_expert_.forward(x, inputs) *
             at::sigmoid(shared_expert_gate_.forward(*inputs.kernels, x));
  });
  BlockOutput output;
  output.hidden = chosen + shared;
  output.experts = routing.experts;
  if (!want_auxiliary_loss || !inputs.training) return output;
  if (inputs.pooled_auxiliary_loss) {
    const std::int64_t real_own =
        inputs.tensor_group == nullptr
            ? inputs.real_tokens
            : ops::real_rows(ops::own_rows(inputs.sequences.total(), *inputs.tensor_group),
                             inputs.real_tokens);
    ops::MoeLoad load = ops::moe_load(routing.probabilities, routing.experts, real_own);
    output.auxiliary_loss = std::move(load.probabilities);
    output.expert_assignments = std::move(load.assignments);
  } else {
    output.auxiliary_loss =
        ops::moe_auxiliary_loss(routing.probabilities, routing.experts, inputs.sequences,
                                inputs.real_tokens, {inputs.context.get(), inputs.tensor_group});
  }
  return output;
}

at::Tensor Moe::routed(const at::Tensor& x, const ops::MoeRouting& routing,
                       const BlockInputs& inputs, const std::function<void()>& meanwhile) {
  const ops::MoeExperts::Inputs rows{x,
                                     routing.weights,
                                     routing.experts,
                                     gate_up_.weight().value(),
                                     down_.weight().value(),
                                     gate_up_.change(),
                                     down_.change()};
  if (inputs.expert_group != nullptr)
    return ops::moe_experts_parallel(*inputs.kernels, rows, *inputs.expert_group, meanwhile);
  meanwhile();
  return ops::moe_experts(*inputs.kernels, rows);
}

void Moe::visit_parameters(const std::function<void(Parameter&)>& visit) {
  visit_linears([&](Linear& linear) { visit(linear.weight()); });
  visit_expert_weights([&](ExpertWeights& weights) { visit(weights.weight()); });
}

void Moe::visit_linears(const std::function<void(Linear&)>& visit) {
  visit(gate_);
  shared_expert_.visit_linears(visit);
  visit(shared_expert_gate_);
}

void Moe::visit_expert_weights(const std::function<void(ExpertWeights&)>& visit) {
  visit(gate_up_);
  visit(down_);
}

}  // namespace heddle::nn
