#pragma once

#include <optional>
#include <utility>

#include "ops/moe/order.h"
#include "ops/registry.h"
#include "ops/sequences.h"

namespace heddle::comm {
class Group;
}

namespace heddle::ops {

struct ContextParallel;

struct MoeRouting {
  at::Tensor weights;        ///< [T,k], dtype of the logits; differentiable.
  at::Tensor experts;        ///< [T,k] int64.
  at::Tensor probabilities;  ///< [T,E] softmax over all experts, fp32 (fp64); differentiable
                             ///< (auxiliary loss).
};

struct MoeRoute {
  static constexpr const char* kName = "moe_route";
  struct Dims {
    std::int64_t num_experts = 0, top_k = 0;
  };
  struct Inputs {
    at::Tensor logits;  ///< [T,E]
    std::int64_t top_k = 1;
    bool normalize = true;
    at::Tensor chosen = {};  ///< [T,k] int64; undefined: the top k.
  };
  struct Functions {
    MoeRouting (*forward)(const Inputs&);
    /// The gradient of the logits; either gradient may be undefined (zero).
    at::Tensor (*backward)(const Inputs&, const MoeRouting&, const at::Tensor& grad_weights,
                           const at::Tensor& grad_probabilities);
  };
};

/// Softmax over all experts in fp32 or wider, top-k, weights renormalised to sum 1 if `normalize`.
/// logits [T,E]. Ties go to the lower index. Differentiable in the logits. Source:
/// Qwen3NextTopKRouter / Qwen3_5MoeTopKRouter. `chosen`, [T,k] int64, if defined: the experts to
/// take instead of the top k, with their probabilities of now (router replay).
MoeRouting moe_route(const KernelTable& kernels, const at::Tensor& logits, std::int64_t top_k,
                     bool normalize, const at::Tensor& chosen = {});
/// By the reference.
MoeRouting moe_route(const at::Tensor& logits, std::int64_t top_k, bool normalize,
                     const at::Tensor& chosen = {});

/// [T,k] bool: which of `experts` [T,k] are among the k likeliest of `probabilities` [T,E]; of
/// equally likely ones all are.
at::Tensor is_likeliest(const at::Tensor& probabilities, const at::Tensor& experts);

/// A low-rank change of one matrix of every expert: W_e + up_e down_e. Undefined: none.
struct ExpertLowRank {
  at::Tensor down;  ///< [E,r,in]; [1,r,in]: one for all experts
  at::Tensor up;    ///< [E,out,r], with whatever scales the change; [1,out,r]: one for all experts

  bool defined() const { return down.defined(); }
  // A single expert shares with nobody.
  bool shares_down() const { return defined() && down.size(0) == 1 && up.size(0) > 1; }
  bool shares_up() const { return defined() && up.size(0) == 1 && down.size(0) > 1; }
};

/// Changes of the experts for consecutive tokens: those of one set of adapters, or none. Experts
/// may share the factor on the side of the hidden states, which then is multiplied by token:
/// gate_up's `down`, and `up` of down.
struct ExpertChanges {
  ExpertLowRank gate_up, down;
  std::int64_t tokens = -1;  ///< -1: all.
};

struct MoeExperts {
  static constexpr const char* kName = "moe_experts";
  /// num_experts: those of this rank.
  struct Dims {
    std::int64_t num_experts = 0, top_k = 0, hidden_size = 0, intermediate_size = 0;
  };
  struct Inputs {
    at::Tensor x;                             ///< [T,H]
    at::Tensor weights;                       ///< [T,k]
    at::Tensor experts;                       ///< [T,k] int64
    at::Tensor gate_up;                       ///< [E,2I,H], gate rows first
    at::Tensor down;                          ///< [E,H,I]
    std::vector<ExpertChanges> changes = {};  ///< They cover all tokens in order; empty: none.
    /// If set, how many of `experts` are in [0,E); the others are E: no expert, and no part of y.
    std::optional<std::int64_t> assignments = {};
  };
  struct Forward {
    at::Tensor y;
    std::vector<at::Tensor> saved;
  };
  struct Gradients {
    at::Tensor x, weights, gate_up,
        down;  ///< gate_up and down undefined unless `want_weight_gradients`.
    std::vector<ExpertChanges> changes;  ///< Defined where the inputs' are.
  };
  struct Functions {
    Forward (*forward)(const Inputs&, bool keep);
    /// `grad_branch` [T,H], unless undefined, is added to the gradient of x.
    Gradients (*backward)(const Inputs&, const Forward&, const at::Tensor& grad_y,
                          bool want_weight_gradients, const at::Tensor& grad_branch);
    /// As they move rows to experts and back; for rows that travel to other ranks.
    at::Tensor (*gather)(const at::Tensor& x, const at::Tensor& source,
                         std::int64_t k) = gather_rows;
    at::Tensor (*sum)(const at::Tensor& rows, const at::Tensor& place, std::int64_t k) = sum_rows;
    bool takes_eight_bits = false;  ///< It multiplies what FrozenExperts lays beside weights.
    bool takes_sets = false;        ///< More than one entry of changes.
  };
};

/// y[t] = sum over j of weights[t,j] * down_e (silu(gate_e x[t]) * up_e x[t]) with e =
/// experts[t,j]: tokens sorted by expert, one product per expert that received any. y [T,H].
/// Low-rank changes enter as two thin products beside each large one, so that frozen experts get
/// neither a changed copy nor a gradient of their size. Several sets share the large products.
/// Differentiable in x, weights, gate_up, down and the changes.
at::Tensor moe_experts(const KernelTable& kernels, const MoeExperts::Inputs& inputs);
/// moe_experts, and x for another layer that reads it: the gradient of that is added where the
/// experts' own rows are.
std::pair<at::Tensor, at::Tensor> moe_experts_branch(const KernelTable& kernels,
                                                     const MoeExperts::Inputs& inputs);

/// The ranks that share the tokens of a batch, of each kind null if one rank has all.
struct TokenSharing {
  /// They share the sequences, which then are this rank's fragments.
  const ContextParallel* context = nullptr;
  /// They share the rows of those in turn: probabilities [T/n,E], experts [T/n,k].
  const comm::Group* rows = nullptr;
};

/// Load-balancing loss E * sum_e f_e P_e, f_e = assignments of expert e / tokens (sums to k), P_e =
/// mean probability ("Switch Transformers", arXiv 2101.03961, eq. 4-6). Additive form: computed per
/// sequence and weighted by its token count, returned as a sum over tokens (divide by the global
/// token count); tokens from `real_tokens` on count nowhere. probabilities [T,E], experts [T,k].
/// With `sharing` the loss is this rank's part of the sum. Differentiable in the probabilities.
at::Tensor moe_auxiliary_loss(const at::Tensor& probabilities, const at::Tensor& experts,
                              const Sequences& sequences, std::int64_t real_tokens,
                              const TokenSharing& sharing = {});

/// How one layer loads its experts: what a balancing loss that pools several layers adds up.
struct MoeLoad {
  at::Tensor probabilities;  ///< [E] sums over tokens, fp32 (fp64); differentiable.
  at::Tensor assignments;    ///< [E] of the same dtype: how often each expert was chosen.
};

/// The load of the first `real_tokens` tokens. probabilities [T,E], experts [T,k].
MoeLoad moe_load(const at::Tensor& probabilities, const at::Tensor& experts,
                 std::int64_t real_tokens);

}  // namespace heddle::ops
