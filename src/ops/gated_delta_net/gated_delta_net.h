#pragma once

#include <array>
#include <functional>
#include <utility>
#include <vector>

#include "ops/output_again.h"
#include "ops/registry.h"
#include "ops/sequences.h"

namespace heddle::ops {

struct GatedDeltaRuleOptions {
  double scale = 0;          ///< Multiplies q after normalisation; 0 means K^-1/2.
  bool normalize_qk = true;  ///< q and k are divided by sqrt(sum of squares + 1e-6) first.
  bool want_final_state = false;
};

/// Saved by a kernel's forward for its own backward; other kernels cannot read it.
struct GatedDeltaRuleForward {
  at::Tensor o;
  at::Tensor final_state;  ///< Undefined unless asked for.
  std::vector<at::Tensor> saved;
};

/// q, k and v may be the columns of one tensor, in this order: split_qkv's backward then needs no
/// copy.
struct GatedDeltaRuleGradients {
  at::Tensor q, k, v, g, beta, initial_state;  ///< initial_state undefined if there was none.
};

struct GatedDeltaRule {
  static constexpr const char* kName = "gated_delta_rule";
  /// Heads of this rank.
  struct Dims {
    std::int64_t num_k_heads = 0, num_v_heads = 0, head_k_dim = 0, head_v_dim = 0;
  };
  struct Inputs {
    at::Tensor q, k, v;  ///< Any token stride: columns of a fused projection need no copy.
    at::Tensor g, beta;
    at::Tensor initial_state;  ///< May be undefined: zero.
    Sequences sequences;
    GatedDeltaRuleOptions options;
    /// Unless empty, makes q, k and v anew in the backward, so that they are not kept until then.
    std::function<std::array<at::Tensor, 3>()> qkv_again = {};
  };
  struct Functions {
    /// `keep` false: nothing will be differentiated, save nothing.
    GatedDeltaRuleForward (*forward)(const Inputs&, bool keep);
    /// Either gradient may be undefined (zero).
    GatedDeltaRuleGradients (*backward)(const Inputs&, const GatedDeltaRuleForward&,
                                        const at::Tensor& grad_o,
                                        const at::Tensor& grad_final_state);
  };
};

struct GatedDeltaRuleResult {
  at::Tensor o;            ///< [T,Hv,V], dtype of v.
  at::Tensor final_state;  ///< [S,Hv,K,V], fp32 (fp64 for fp64 inputs); undefined unless asked for.
};

/// The gated delta rule over packed sequences, differentiable in all tensors. q,k [T,Hk,K]; v
/// [T,Hv,V], Hv a multiple of Hk, value head j uses key head j / (Hv/Hk); g [T,Hv] natural-log
/// decay <= 0 and beta [T,Hv], both fp32 or wider; initial_state [S,Hv,K,V] or undefined. "Gated
/// Delta Networks" (arXiv 2412.06464); chunked form and backward identities in docs/gdn.md. Each
/// sequence starts from its own state and sees nothing of its neighbours.
GatedDeltaRuleResult gated_delta_rule(const KernelTable& kernels,
                                      const GatedDeltaRule::Inputs& inputs);

/// The columns of qkv [T, 2*Hk*K + Hv*V] as q [T,Hk,K], k [T,Hk,K] and v [T,Hv,V], sharing its
/// memory. Differentiable; gradients that are again columns of one tensor are joined without a
/// copy.
std::array<at::Tensor, 3> split_qkv(const at::Tensor& qkv, std::int64_t num_k_heads,
                                    std::int64_t head_k_dim, std::int64_t num_v_heads,
                                    std::int64_t head_v_dim);

struct GdnGates {
  static constexpr const char* kName = "gdn_gates";
  struct Dims {
    std::int64_t num_v_heads = 0;
  };
  struct Functions {
    std::pair<at::Tensor, at::Tensor> (*forward)(const at::Tensor& a, const at::Tensor& b,
                                                 const at::Tensor& a_log,
                                                 const at::Tensor& dt_bias);
    /// Gradients of a, b, a_log, dt_bias; the last two may be undefined if they are not wanted.
    std::vector<at::Tensor> (*backward)(const at::Tensor& a, const at::Tensor& b,
                                        const at::Tensor& a_log, const at::Tensor& dt_bias,
                                        const at::Tensor& g, const at::Tensor& beta,
                                        const at::Tensor& grad_g, const at::Tensor& grad_beta,
                                        bool wants_parameters);
  };
};

/// g = -exp(a_log) softplus(a + dt_bias) and beta = sigmoid(b), both [T,Hv] in fp32 (fp64 for
/// fp64). a,b [T,Hv] in the model's dtype; a_log, dt_bias [Hv]. Exponentials in fp32 or wider.
/// Differentiable.
std::pair<at::Tensor, at::Tensor> gdn_gates(const KernelTable& kernels, const at::Tensor& a,
                                            const at::Tensor& b, const at::Tensor& a_log,
                                            const at::Tensor& dt_bias);

struct GatedRmsNorm {
  static constexpr const char* kName = "gated_rms_norm";
  struct Dims {
    std::int64_t dim = 0;  ///< Elements of a row: a value head.
  };
  struct Backward {
    at::Tensor x, z, weight, rstd, grad_y;
    bool wants_weight = true, wants_y = false;
  };
  struct Gradients {
    at::Tensor x, z;
    at::Tensor weight;  ///< May be undefined if it is not wanted.
    at::Tensor y;       ///< The output again; undefined if it is not wanted.
  };
  struct Functions {
    /// Returns y and what the backward needs (rstd).
    std::pair<at::Tensor, at::Tensor> (*forward)(const at::Tensor& x, const at::Tensor& z,
                                                 const at::Tensor& weight, double eps);
    Gradients (*backward)(const Backward& in);
    /// Whether the backward gives y again where that is wanted.
    bool gives_output_again = false;
  };
};

/// y = (weight * x * rsqrt(mean(x^2) + eps)) * silu(z) over the last dimension. x,z [T,Hv,V];
/// weight [V], not zero-centred. Statistics and gate in fp32 or wider. Differentiable. Source:
/// Qwen3_5RMSNormGated.
at::Tensor gated_rms_norm(const KernelTable& kernels, const at::Tensor& x, const at::Tensor& z,
                          const at::Tensor& weight, double eps, OutputAgain again = {});

}  // namespace heddle::ops
