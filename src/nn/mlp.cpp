#include "nn/mlp.h"

#include <ATen/Context.h>
#include <ATen/TensorOperators.h>
#include <ATen/core/grad_mode.h>
#include <ATen/ops/cat.h>
#include <ATen/ops/sum.h>

#include <utility>

#include "nn/low_rank.h"
#include "nn/tensor_parallel.h"
#include "ops/autograd.h"
#include "ops/collectives.h"
#include "ops/moe/expert_parallel.h"
#include "ops/moe/moe.h"
#include "ops/moe/shared_expert.h"
#include "ops/swiglu/swiglu.h"

namespace heddle::nn {
namespace {

bool changes_experts(const AdaptedRows& rows) {
  return rows.set != nullptr && rows.set->changes_experts();
}

/// Neighbours that leave the routed experts as they are, joined.
std::vector<AdaptedRows> joined(const std::vector<AdaptedRows>& segments) {
  std::vector<AdaptedRows> result;
  for (const AdaptedRows& segment : segments) {
    if (!result.empty() && !changes_experts(result.back()) && !changes_experts(segment)) {
      result.back().rows += segment.rows;
    } else {
      result.push_back(segment);
    }
  }
  return result;
}

}  // namespace

using comm::Dim;

Mlp::Mlp(const std::string& prefix, std::int64_t hidden_size, std::int64_t intermediate_size)
    : gate_proj_(prefix + "gate_proj.weight", intermediate_size, hidden_size, {{Dim::kTp, 0, {}}}),
      up_proj_(prefix + "up_proj.weight", intermediate_size, hidden_size, {{Dim::kTp, 0, {}}}),
      down_proj_(prefix + "down_proj.weight", hidden_size, intermediate_size, {{Dim::kTp, 1, {}}}) {
}

at::Tensor Mlp::share(const LinearInput& x, const Pass& pass, const at::Tensor& residual,
                      bool value_unused) {
  const auto gated = [&] {
    const at::Tensor in_one = gated_in_one(pass, x, gate_proj_, up_proj_);
    if (in_one.defined()) return LinearInput(in_one);
    const std::vector<at::Tensor> gate_up = forward_all(pass, x, {&gate_proj_, &up_proj_});
    const auto product = [&](const ops::OutputAgain& again) {
      return ops::swiglu(*pass.kernels, gate_up[0], gate_up[1], again);
    };
    return pass.recompute_elementwise ? LinearInput::made_again(product) : LinearInput(product({}));
  };
  LinearInput input = gated();
  input.outputs_unused = value_unused;
  input.residual = residual;
  return down_proj_.forward(pass, input);
}

at::Tensor Mlp::forward(const LinearInput& x, const Pass& pass, const at::Tensor& residual,
                        bool value_unused) {
  return run_tensor_parallel(
      x, pass, residual,
      [&](const LinearInput& rows, const at::Tensor& own_residual) {
        return share(rows, pass, own_residual, value_unused);
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
               dims.hidden_size, ExpertWeights::HiddenSide::kInput),
      down_(prefix + "experts.down_proj", dims.num_experts, dims.hidden_size,
            dims.moe_intermediate_size, ExpertWeights::HiddenSide::kOutput) {
  gate_.weight().set_partial_gradient();
  gate_.weight().linear_place().is_router = true;
  if (dims.shared_expert_intermediate_size == 0) return;
  shared_expert_.emplace(prefix + "shared_expert.", dims.hidden_size,
                         dims.shared_expert_intermediate_size);
  shared_expert_gate_.emplace(prefix + "shared_expert_gate.weight", 1, dims.hidden_size);
  shared_expert_gate_->weight().set_partial_gradient();
}

BlockOutput Moe::forward(const at::Tensor& x, const at::Tensor& x_of_gates, const Pass& pass,
                         bool want_auxiliary_loss, const at::Tensor& residual, bool value_unused) {
  at::Tensor logits, shared, shared_gate;
  if (shared_expert_ && pass.expert_group == nullptr && at::GradMode::is_enabled()) {
    // One product has the gradients of x from both.
    const std::vector<at::Tensor> both =
        forward_all(pass, x_of_gates, {&gate_, &*shared_expert_gate_});
    logits = both[0];
    shared_gate = both[1];
  } else {
    logits = gate_.forward(pass, x_of_gates);
  }
  const ops::MoeRouting routing = ops::moe_route(*pass.kernels, logits, dims_.num_experts_per_tok,
                                                 dims_.normalize_top_k, pass.experts);
  if (pass.experts.defined() && pass.agreement != nullptr) {
    const at::Tensor agreed = ops::is_likeliest(routing.probabilities, routing.experts);
    pass.agreement->agreed.add_(at::sum(agreed.sum(1) * pass.agreement->counted));
  }
  const at::Tensor chosen = routed(x, routing, pass, [&](const at::Tensor& same) {
    if (!shared_expert_) return;
    if (!shared_gate.defined()) shared_gate = shared_expert_gate_->forward(pass, x_of_gates);
    shared = shared_expert_->forward(same, pass);
  });
  BlockOutput output;
  if (!shared.defined()) {
    output.hidden = add_to_residual(residual, chosen, value_unused);
  } else if (value_unused) {
    output.hidden = add_to_residual(
        residual, ops::shared_expert_sum(*pass.kernels, chosen, shared, shared_gate), true);
  } else {
    output.hidden = ops::shared_expert_sum(*pass.kernels, chosen, shared, shared_gate, residual);
  }
  output.experts = routing.experts;
  if (!want_auxiliary_loss || !pass.training) return output;
  if (pass.pooled_auxiliary_loss) {
    const std::int64_t real_own =
        pass.tensor_group == nullptr
            ? pass.real_tokens
            : ops::real_rows(ops::own_rows(pass.sequences.total(), *pass.tensor_group),
                             pass.real_tokens);
    ops::MoeLoad load = ops::moe_load(routing.probabilities, routing.experts, real_own);
    output.auxiliary_loss = std::move(load.probabilities);
    output.expert_assignments = std::move(load.assignments);
  } else {
    output.auxiliary_loss =
        ops::moe_auxiliary_loss(routing.probabilities, routing.experts, pass.sequences,
                                pass.real_tokens, {pass.context.get(), pass.tensor_group});
  }
  return output;
}

at::Tensor Moe::routed(const at::Tensor& x, const ops::MoeRouting& routing, const Pass& pass,
                       const std::function<void(const at::Tensor& x)>& other) {
  const std::vector<AdaptedRows> given = adapters_of(pass, x.size(0));
  // Sets share the products of the experts, unless the process is deterministic.
  const bool is_shared = !at::globalContext().deterministicAlgorithms();
  const std::vector<AdaptedRows> segments = is_shared ? joined(given) : given;
  const auto changes = [&](const AdaptedRows& rows) {
    const auto of = [&](const ExpertWeights& weights) {
      LowRankExperts* const change = rows.set != nullptr ? rows.set->of(weights) : nullptr;
      return change != nullptr ? change->change() : ops::ExpertLowRank();
    };
    return ops::ExpertChanges{of(gate_up_), of(down_), rows.rows};
  };
  ops::MoeExperts::Inputs all{x, routing.weights, routing.experts, gate_up_.weight().value(),
                              down_.weight().value()};
  const bool is_one = segments.size() < 2;
  if (is_one || (is_shared && pass.kernels->get<ops::MoeExperts>().takes_sets)) {
    for (const AdaptedRows& segment : segments)
      if (!is_one || changes_experts(segment)) all.changes.push_back(changes(segment));
    if (is_one && !all.changes.empty()) all.changes[0].tokens = -1;
    if (pass.expert_group != nullptr)
      return ops::moe_experts_parallel(*pass.kernels, all, *pass.expert_group, [&] { other(x); });
    const auto [y, same] = ops::moe_experts_branch(*pass.kernels, all);
    other(same);
    return y;
  }
  TORCH_CHECK(pass.expert_group == nullptr,
              "several sets that change routed experts in one pass while ranks share those (ep) "
              "are not built: run the sets one after the other");
  other(x);
  std::vector<at::Tensor> parts;
  std::int64_t first = 0;
  for (const AdaptedRows& segment : segments) {
    ops::MoeExperts::Inputs own = all;
    own.x = x.narrow(0, first, segment.rows);
    own.weights = routing.weights.narrow(0, first, segment.rows);
    own.experts = routing.experts.narrow(0, first, segment.rows);
    if (changes_experts(segment)) own.changes.push_back(changes(segment));
    parts.push_back(ops::moe_experts(*pass.kernels, own));
    first += segment.rows;
  }
  return at::cat(parts);
}

void Moe::visit_parameters(const std::function<void(Parameter&)>& visit) {
  visit_linears([&](Linear& linear) { visit(linear.weight()); });
  visit_expert_weights([&](ExpertWeights& weights) { visit(weights.weight()); });
}

void Moe::visit_linears(const std::function<void(Linear&)>& visit) {
  visit(gate_);
  if (!shared_expert_) return;
  shared_expert_->visit_linears(visit);
  visit(*shared_expert_gate_);
}

void Moe::visit_expert_weights(const std::function<void(ExpertWeights&)>& visit) {
  visit(gate_up_);
  visit(down_);
}

}  // namespace heddle::nn
