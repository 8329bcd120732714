#pragma once

#include <functional>
#include <optional>
#include <string>
#include <utility>

#include "models/layer_shape.h"
#include "nn/attention.h"
#include "nn/block.h"
#include "nn/cache.h"
#include "nn/gated_delta_net.h"
#include "nn/linear.h"
#include "nn/mlp.h"
#include "runtime/context.h"

namespace heddle::models {

/// RMSNorms of a model: they scale by offset + weight.
struct NormShape {
  double eps;
  float offset;
};

/// One decoder layer: h += mixer(norm(h)); h += mlp(norm(h)).
class DecoderLayer : public nn::Block {
 public:
  /// `index`: its place among the layers, and in a cache. `ranks` along tp share the layer.
  DecoderLayer(const LayerShape& shape, const NormShape& norms, const std::string& prefix,
               std::int64_t index, bool want_auxiliary_loss, std::int64_t ranks = 1);

  std::size_t stages() const override { return 2; }
  nn::BlockOutput forward(std::size_t stage, const at::Tensor& hidden,
                          const nn::Pass& pass) override;
  nn::LayerCache make_cache(const nn::CacheSize& size, const runtime::Context& context) const;
  void visit_parameters(const std::function<void(nn::Parameter&)>& visit) override;
  void visit_linears(const std::function<void(nn::Linear&)>& visit);
  void visit_expert_weights(const std::function<void(nn::ExpertWeights&)>& visit);

 private:
  nn::BlockOutput mlp(const at::Tensor& hidden, const nn::Pass& pass);
  struct Normalized {
    nn::LinearInput x;    ///< The normalised hidden states as the projections read them.
    at::Tensor residual;  ///< The residual stream.
    at::Tensor x_2;       ///< x for a second reader; undefined where x is still to be made.
  };
  /// `is_kept`: what reads x keeps it in any case, as experts do.
  Normalized normalized(const at::Tensor& hidden, const nn::Parameter& weight, bool is_kept,
                        const nn::Pass& pass) const;

  std::int64_t index_;
  NormShape norms_;
  bool want_auxiliary_loss_;
  nn::Parameter input_layernorm_, post_attention_layernorm_;
  std::optional<nn::Attention> attention_;
  std::optional<nn::GatedDeltaNet> gated_delta_net_;
  std::optional<nn::Mlp> dense_;
  std::optional<nn::Moe> moe_;
};

}  // namespace heddle::models
