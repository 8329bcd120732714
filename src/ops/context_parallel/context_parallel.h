#pragma once

#include <array>
#include <vector>

#include "comm/group.h"
#include "ops/attention/attention.h"
#include "ops/context_parallel/plan.h"
#include "ops/gated_delta_net/gated_delta_net.h"

/// Operators that mix tokens, when the tokens of one batch are divided over the ranks along cp.
/// Everything else works token by token and needs to know nothing of it. Mathematics: docs/gdn.md.
namespace heddle::ops {

/// One batch and the ranks that share it, with what all layers need of it on the device.
struct ContextParallel {
  ContextParallel(ContextPlan plan, comm::Group group, c10::Device device);

  ContextPlan plan;
  comm::Group group;
  Sequences sequences;  ///< Sequences of the whole batch.
  Sequences fragments;  ///< The rank's fragments, as sequences.
  /// kState, if a sequence crosses segments: the keys that each of the rank's segments sees, as
  /// rows of the ranks' gathered tokens (plan.most_tokens() rows a rank), and their boundaries.
  std::vector<at::Tensor> key_rows;
  Sequences key_sequences;
};

// State passing: each rank keeps its tokens. Arguments and results are this rank's tokens.

/// Initial state [F,C,W-1] of causal_conv1d for the rank's F fragments: the W-1 inputs
/// before each, from whichever rank has them, zero where a sequence begins. x [T,C].
/// Differentiable.
at::Tensor context_conv_state(const at::Tensor& x, std::int64_t width,
                              const ContextParallel& context);

/// The gated delta rule of sequences that cross segments: what each segment adds to the state and
/// how it transforms the state that enters (S -> M S + S_ext) is gathered, so that every rank knows
/// the states that enter its segments. The kernel is the one of the table, and is given fragments
/// with initial states. The backward gathers the states' gradients alone, with the transitions M of
/// the forward. A head whose decay over a segment makes M invisible is not computed. `in.sequences`
/// are the fragments; `in.initial_state` is undefined. o [T,Hv,V]; differentiable.
at::Tensor context_gated_delta_rule(const KernelTable& kernels, const GatedDeltaRule::Inputs& in,
                                    const ContextParallel& context);

/// Inputs of the attention of this rank's queries q [T,Hq,D], one sequence a fragment, over all
/// keys and values of the same sequence up to each: k and v [T,Hkv,D] are gathered from all ranks.
/// Differentiable.
Attention::Inputs context_attention_inputs(const at::Tensor& q, const at::Tensor& k,
                                           const at::Tensor& v, const ContextParallel& context);

// Ulysses ("DeepSpeed Ulysses", arXiv 2309.14509): all tokens for a part of the heads.

/// From this rank's tokens of all heads to all tokens of this rank's heads. parts: tensors [T,C_i]
/// of one dtype, the columns of each divided evenly over the ranks in order; returns [T_all,
/// C_i/n]. Differentiable.
std::vector<at::Tensor> tokens_to_heads(const std::vector<at::Tensor>& parts,
                                        const ContextParallel& context);

/// The way back: x [T_all,C/n] to [T,C]. Differentiable.
at::Tensor heads_to_tokens(const at::Tensor& x, const ContextParallel& context);

}  // namespace heddle::ops
