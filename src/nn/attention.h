#pragma once

#include "nn/block.h"
#include "nn/cache.h"
#include "nn/linear.h"
#include "ops/gradient_halves.h"

namespace heddle::nn {

struct AttentionDims {
  std::int64_t hidden_size, num_attention_heads, num_key_value_heads, head_dim;
  double rms_norm_eps;
  float norm_offset;     ///< q and k norms scale by this plus their weight (ops::NormWeight).
  bool has_output_gate;  ///< q_proj gives query and gate per head; output x sigmoid(gate).
};

/// How often every key/value head is repeated so that the ranks of Ulysses can divide them; it
/// divides the query heads of each if the ranks divide all query heads.
std::int64_t ulysses_key_copies(std::int64_t num_key_value_heads, std::int64_t ranks);

/// Full attention: RMSNorm of q and k per head, RoPE over the head or a part of it, causal GQA, and
/// an output gate where the dims have one (Qwen3-Next, Qwen3.5; Qwen3 has none).
class Attention {
 public:
  /// `prefix` ends before "q_proj.weight", for example "model.layers.3.self_attn."; `ranks` share
  /// the heads.
  Attention(const std::string& prefix, const AttentionDims& dims, std::int64_t ranks = 1);

  /// x [T,H]; [T,H], of several ranks each one's share of the sum; added to `residual` if that is
  /// defined. With a cache of the pass's sequences their new keys and values are appended to it,
  /// and queries see all of it; null: a pass without one.
  at::Tensor forward(const LinearInput& x, const Pass& pass, const at::Tensor& residual = {},
                     LayerCache* cache = nullptr);
  /// A cache for this rank's heads, zero.
  LayerCache make_cache(const CacheSize& size, const at::TensorOptions& options) const;
  void visit_parameters(const std::function<void(Parameter&)>& visit);
  void visit_linears(const std::function<void(Linear&)>& visit);

 private:
  struct Projected {
    at::Tensor q, k, v, gate;                     ///< gate: undefined without an output gate.
    std::shared_ptr<ops::GradientHalves> halves;  ///< Gradients of q and gate.
  };
  Projected project(const LinearInput& x, const Pass& pass);
  /// o [T,Hq,D].
  at::Tensor attend(const Projected& projected, const Pass& pass) const;
  at::Tensor attend_cached(const Projected& projected, const Pass& pass, LayerCache& cache) const;
  at::Tensor attend_by_ulysses(const Projected& projected, const Pass& pass) const;
  at::Tensor finish(const at::Tensor& o, const Projected& projected, const Pass& pass,
                    const at::Tensor& residual = {});

  AttentionDims dims_;  ///< Sizes on this rank.
  Linear q_proj_, k_proj_, v_proj_, o_proj_;
  Parameter q_norm_, k_norm_;
};

}  // namespace heddle::nn
