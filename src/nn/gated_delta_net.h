#pragma once

#include <array>

#include "nn/block.h"
#include "nn/cache.h"
#include "nn/linear.h"

namespace heddle::nn {

struct GatedDeltaNetDims {
  std::int64_t hidden_size, num_key_heads, num_value_heads, key_head_dim, value_head_dim,
      conv_kernel;
  double rms_norm_eps;
  /// Qwen3-Next: in_proj_qkvz and in_proj_ba, interleaved per key head, instead of
  /// in_proj_{qkv,z,b,a}.
  bool interleaved_projections;
  /// The convolution's output is kept where other elementwise results are made again. It costs more
  /// time than they do, and beside the weights of experts it is little memory.
  bool keeps_convolution = false;

  std::int64_t key_dim() const { return num_key_heads * key_head_dim; }
  std::int64_t value_dim() const { return num_value_heads * value_head_dim; }
  std::int64_t conv_channels() const { return 2 * key_dim() + value_dim(); }
};

/// Gated DeltaNet mixer: projections, causal convolution + SiLU over q|k|v, gates, gated delta
/// rule, gated RMSNorm, output projection. Formulas: docs/gdn.md; source: Qwen3_5GatedDeltaNet,
/// Qwen3NextGatedDeltaNet.
class GatedDeltaNet {
 public:
  /// `prefix` for example "model.layers.0.linear_attn."; `ranks` share the key heads, each with its
  /// value heads.
  GatedDeltaNet(const std::string& prefix, const GatedDeltaNetDims& dims, std::int64_t ranks = 1);

  /// x [T,H]; [T,H], of several ranks each one's share of the sum; added to `residual` if that is
  /// defined. With a cache of the pass's sequences they go on from its states and inputs of the
  /// convolution, which are updated; null: a pass without one.
  at::Tensor forward(const LinearInput& x, const Pass& pass, const at::Tensor& residual = {},
                     LayerCache* cache = nullptr);
  /// An empty cache for this rank's heads, zero; states in `state_dtype`.
  LayerCache make_cache(std::int64_t slots, const at::TensorOptions& options,
                        c10::ScalarType state_dtype) const;
  void visit_parameters(const std::function<void(Parameter&)>& visit);
  void visit_linears(const std::function<void(Linear&)>& visit);

 private:
  struct Projected {
    at::Tensor qkv;   ///< [T, conv_channels]
    at::Tensor z;     ///< [T, Hv, V]
    at::Tensor b, a;  ///< [T, Hv]
  };
  Projected project(const LinearInput& x, const Pass& pass);
  /// Modules that mix tokens: convolution, gates and rule of some of the heads.
  struct Mixing {
    at::Tensor qkv, a, b;  ///< [T, channels], [T, Hv], [T, Hv]
    at::Tensor conv_weight, a_log, dt_bias;
    std::int64_t num_key_heads, num_value_heads;
  };
  /// The modules for this rank's heads.
  Mixing mixing(const Projected& projected) const;
  /// o [T,Hv,V].
  at::Tensor mix(const Projected& projected, const Pass& pass) const;
  /// One token for each sequence, from mixing to the output projection.
  at::Tensor decode(const Projected& projected, const Pass& pass, const at::Tensor& residual,
                    LayerCache& cache);
  at::Tensor mix_cached(const Projected& projected, const Pass& pass, LayerCache& cache) const;
  at::Tensor run(const Mixing& mixing, const ops::Sequences& sequences, const Pass& pass) const;
  at::Tensor mix_by_ulysses(const Projected& projected, const Pass& pass) const;
  std::array<at::Tensor, 3> split_qkv(const at::Tensor& qkv) const;
  at::Tensor finish(const at::Tensor& o, const Projected& projected, const Pass& pass,
                    const at::Tensor& residual = {});

  GatedDeltaNetDims dims_;                            ///< Sizes on this rank.
  std::vector<std::unique_ptr<Linear>> projections_;  ///< {qkv, z, b, a} or {qkvz, ba}
  Linear out_proj_;
  Parameter conv_, a_log_, dt_bias_, norm_;
};

}  // namespace heddle::nn
