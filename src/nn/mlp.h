#pragma once

#include <optional>

#include "nn/block.h"
#include "nn/expert_weights.h"
#include "nn/linear.h"
#include "ops/moe/moe.h"

namespace heddle::nn {

/// down(silu(gate x) * up x).
class Mlp {
 public:
  /// `prefix` for example "model.layers.0.mlp.".
  Mlp(const std::string& prefix, std::int64_t hidden_size, std::int64_t intermediate_size);
  /// x [T/tp,H], as the result, which is added to `residual` if that is defined. `value_unused`: it
  /// has its gradient, but no value.
  at::Tensor forward(const LinearInput& x, const Pass& pass, const at::Tensor& residual = {},
                     bool value_unused = false);
  void visit_parameters(const std::function<void(Parameter&)>& visit);
  void visit_linears(const std::function<void(Linear&)>& visit);

 private:
  at::Tensor share(const LinearInput& x, const Pass& pass, const at::Tensor& residual,
                   bool value_unused);

  Linear gate_proj_, up_proj_, down_proj_;
};

struct MoeDims {
  std::int64_t hidden_size, num_experts, num_experts_per_tok, moe_intermediate_size,
      shared_expert_intermediate_size;  ///< 0: no shared expert.
  bool normalize_top_k;
};

/// Routed experts plus, where the dims have one, a gated shared expert. Experts are held fused,
/// gate_up [E,2I,H] with the gate rows first; the ranks along ep have E / ep each, and tokens
/// travel to them. Router and experts take each token from the rank along tp that has its row.
class Moe {
 public:
  Moe(const std::string& prefix, const MoeDims& dims);
  /// x [T/tp,H], as the result, which is added to `residual`. Router and shared gate read
  /// `x_of_gates`, x whose gradient is apart from that of what the experts read. The auxiliary loss
  /// is defined while training if `want_auxiliary_loss`. The experts that were chosen, or replayed,
  /// are always handed out. `value_unused`: the hidden states have their gradient, but no value.
  BlockOutput forward(const at::Tensor& x, const at::Tensor& x_of_gates, const Pass& pass,
                      bool want_auxiliary_loss, const at::Tensor& residual, bool value_unused);
  void visit_parameters(const std::function<void(Parameter&)>& visit);
  void visit_linears(const std::function<void(Linear&)>& visit);
  void visit_expert_weights(const std::function<void(ExpertWeights&)>& visit);

 private:
  /// The routed experts' sum. `other` is run once with x, while the tokens travel if they do.
  at::Tensor routed(const at::Tensor& x, const ops::MoeRouting& routing, const Pass& pass,
                    const std::function<void(const at::Tensor& x)>& other);

  MoeDims dims_;
  Linear gate_;
  ExpertWeights gate_up_, down_;
  std::optional<Mlp> shared_expert_;
  std::optional<Linear> shared_expert_gate_;
};

}  // namespace heddle::nn
