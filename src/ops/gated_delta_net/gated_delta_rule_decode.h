#pragma once

#include "ops/cache_rows.h"
#include "ops/gated_delta_net/gated_delta_net.h"

namespace heddle::ops {

/// A layer's mixer between its projections, for one new token in each of B sequences.
struct GatedDeltaNetDecode {
  at::Tensor qkv, a, b, z;         ///< [B,C] before the convolution, [B,Hv], [B,Hv], [B,Hv,V]
  at::Tensor conv_weight;          ///< [C,W]
  at::Tensor a_log, dt_bias;       ///< [Hv]
  at::Tensor norm_weight;          ///< [V]
  at::Tensor conv_states, states;  ///< As conv_decode and gated_delta_rule_decode have them.
  std::int64_t num_key_heads = 0;
  double norm_eps = 0;
};

struct GatedDeltaRuleDecode {
  static constexpr const char* kName = "gated_delta_rule_decode";
  using Dims = GatedDeltaRule::Dims;
  struct Inputs {
    at::Tensor q, k, v;  ///< [B,Hk,K], [B,Hk,K], [B,Hv,V]; any stride between tokens.
    at::Tensor g, beta;  ///< [B,Hv] fp32 (fp64 for fp64)
    /// [slots,Hv,K,V] fp32 (fp64 for fp64) or bf16, updated in place. A step computes in the wide
    /// dtype; bf16 states are rounded once, to nearest even, when they are stored.
    at::Tensor states;
    double scale = 0;          ///< As in GatedDeltaRuleOptions.
    bool normalize_qk = true;  ///< As in GatedDeltaRuleOptions.
  };
  struct Functions {
    /// `scale` is set.
    at::Tensor (*forward)(const Inputs&, const CacheRows&);
    /// Convolution, gates, rule and gated norm in one pass, [B,Hv*V], of the mixers that
    /// `takes_net` is true of; null: one after another.
    bool (*takes_net)(const GatedDeltaNetDecode&) = nullptr;
    at::Tensor (*net)(const GatedDeltaNetDecode&, const CacheRows&) = nullptr;
  };
};

/// The gated delta rule for one new token in each of B sequences, whose states it updates in place:
/// S = e^g S; S += k (beta (v - k^T S)); o = q^T S, heads as in gated_delta_rule, with S as it is
/// before it is rounded. Returns o [B,Hv,V] in the dtype of v. Not differentiable. TORCH_CHECKs
/// that every slot exists; no two sequences may share one.
at::Tensor gated_delta_rule_decode(const KernelTable& kernels,
                                   const GatedDeltaRuleDecode::Inputs& inputs,
                                   const CacheRows& rows);

/// gated_rms_norm(gated_delta_rule_decode(conv_decode(qkv), gdn_gates(a, b)), z): y [B,Hv*V]. Where
/// the kernel of the rule does the others' work too, with the same roundings between them.
at::Tensor gated_delta_net_decode(const KernelTable& kernels, const GatedDeltaNetDecode& inputs,
                                  const CacheRows& rows);

}  // namespace heddle::ops
