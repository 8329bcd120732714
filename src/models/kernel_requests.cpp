#include "models/kernel_requests.h"

#include <algorithm>

#include "ops/attention/attention.h"
#include "ops/attention/attention_decode.h"
#include "ops/causal_conv1d/causal_conv1d.h"
#include "ops/causal_conv1d/conv_decode.h"
#include "ops/decode_step/decode_step.h"
#include "ops/embedding/embedding.h"
#include "ops/gated_delta_net/gated_delta_net.h"
#include "ops/gated_delta_net/gated_delta_rule_decode.h"
#include "ops/grouped_low_rank/grouped_low_rank.h"
#include "ops/linear/linear.h"
#include "ops/linear_cross_entropy/linear_cross_entropy.h"
#include "ops/moe/frozen_experts.h"
#include "ops/moe/moe.h"
#include "ops/moe/shared_expert.h"
#include "ops/optimizer_step/optimizer_step.h"
#include "ops/rms_norm/rms_norm.h"
#include "ops/rotary/rotary.h"
#include "ops/sampling/sampling.h"
#include "ops/swiglu/swiglu.h"

namespace heddle::models {
namespace {

/// Collects the requests of one model.
struct Requests {
  const Degrees& degrees;
  const Duties& duties;
  std::vector<ops::OpRequest> all = {};

  template <class Op>
  void add(typename Op::Dims dims = {}) {
    all.push_back(ops::OpRequest::of<Op>(std::move(dims), duties.use));
  }
  /// An operator that decodes.
  template <class Op>
  void add_decoding(typename Op::Dims dims = {}) {
    if (duties.generates)
      all.push_back(ops::OpRequest::of<Op>(std::move(dims), ops::Use::kGeneration));
  }
};

void add_gated_delta_net(Requests& requests, const nn::GatedDeltaNetDims& dims) {
  const std::int64_t ranks = requests.degrees.tp * requests.degrees.ulysses;
  const ops::GatedDeltaRule::Dims rule = {.num_k_heads = dims.num_key_heads / ranks,
                                          .num_v_heads = dims.num_value_heads / ranks,
                                          .head_k_dim = dims.key_head_dim,
                                          .head_v_dim = dims.value_head_dim};
  const ops::CausalConv1d::Dims conv = {.channels = dims.conv_channels() / ranks,
                                        .width = dims.conv_kernel};
  requests.add<ops::GatedDeltaRule>(rule);
  requests.add<ops::GdnGates>({.num_v_heads = rule.num_v_heads});
  requests.add<ops::GatedRmsNorm>({.dim = dims.value_head_dim});
  requests.add<ops::CausalConv1d>(conv);
  requests.add_decoding<ops::ConvDecode>(conv);
  requests.add_decoding<ops::GatedDeltaRuleDecode>(rule);
}

void add_attention(Requests& requests, const nn::AttentionDims& dims, std::int64_t rotary_dim) {
  const auto [tp, ulysses, ep] = requests.degrees;
  const std::int64_t num_kv_heads = std::max<std::int64_t>(1, dims.num_key_value_heads / tp);
  const std::int64_t copies = nn::ulysses_key_copies(num_kv_heads, ulysses);
  const ops::Attention::Dims attention = {.num_heads = dims.num_attention_heads / (tp * ulysses),
                                          .num_kv_heads = num_kv_heads * copies / ulysses,
                                          .head_dim = dims.head_dim};
  requests.add<ops::QkNormRope>({.head_dim = dims.head_dim, .rotary_dim = rotary_dim});
  requests.add<ops::Attention>(attention);
  requests.add_decoding<ops::AttentionDecode>(attention);
  if (dims.has_output_gate) requests.add<ops::OutputGate>();
}

void add_moe(Requests& requests, const nn::MoeDims& dims) {
  requests.add<ops::MoeRoute>({.num_experts = dims.num_experts, .top_k = dims.num_experts_per_tok});
  const ops::MoeExperts::Dims experts = {.num_experts = dims.num_experts / requests.degrees.ep,
                                         .top_k = dims.num_experts_per_tok,
                                         .hidden_size = dims.hidden_size,
                                         .intermediate_size = dims.moe_intermediate_size};
  requests.add<ops::MoeExperts>(experts);
  if (requests.duties.use == ops::Use::kTraining && requests.duties.adapter_rank > 0)
    requests.add<ops::FrozenExperts>(experts);
  if (dims.shared_expert_intermediate_size > 0)
    requests.add<ops::SharedExpertSum>({.hidden_size = dims.hidden_size});
}

/// The products of linear layers that a training model computes, on one rank.
ops::Linear::Dims trained_layers(const Config& config, const Degrees& degrees,
                                 const Duties& duties) {
  ops::Linear::Dims dims;
  if (duties.use != ops::Use::kTraining) return dims;
  dims.adapter_rank = duties.adapter_rank;
  for (const LayerShape& layer : config.layers) {
    for (const Product& product : layer.products()) {
      if (product.per_token > 1) continue;  // experts have products of their own
      const bool along_out = product.cut.along == Cut::Along::kOut,
                 along_in = product.cut.along == Cut::Along::kIn;
      dims.layers.push_back({product.name, product.out / (along_out ? degrees.tp : 1),
                             product.in / (along_in ? degrees.tp : 1)});
    }
  }
  return dims;
}

/// Steps of a dense hybrid model that one rank has whole.
void add_decode_step(Requests& requests, const Config& config) {
  const nn::GatedDeltaNetDims* const delta = config.gated_delta_net();
  const nn::AttentionDims* const attention = config.attention();
  if (delta == nullptr || attention == nullptr || config.is_moe() ||
      delta->interleaved_projections || requests.degrees.tp > 1 || requests.degrees.ulysses > 1)
    return;
  requests.add_decoding<ops::DecodeStep>({.layers = config.num_hidden_layers(),
                                          .hidden_size = config.hidden_size,
                                          .intermediate_size = config.layers[0].intermediate_size,
                                          .vocab_size = config.vocab_size,
                                          .num_key_heads = delta->num_key_heads,
                                          .num_value_heads = delta->num_value_heads,
                                          .key_head_dim = delta->key_head_dim,
                                          .value_head_dim = delta->value_head_dim,
                                          .conv_kernel = delta->conv_kernel,
                                          .num_attention_heads = attention->num_attention_heads,
                                          .num_key_value_heads = attention->num_key_value_heads,
                                          .head_dim = attention->head_dim,
                                          .rotary_dim = config.rotary_dim,
                                          .has_output_gate = attention->has_output_gate});
}

}  // namespace

std::vector<ops::OpRequest> kernel_requests(const Config& config, const Degrees& degrees,
                                            const Duties& duties) {
  Requests requests{degrees, duties};
  requests.add<ops::Embedding>();
  requests.add<ops::RmsNorm>({.dim = config.hidden_size});
  requests.add<ops::Linear>(trained_layers(config, degrees, duties));
  if (duties.several_adapters) requests.add<ops::GroupedLowRank>();
  if (const nn::GatedDeltaNetDims* dims = config.gated_delta_net())
    add_gated_delta_net(requests, *dims);
  if (const nn::AttentionDims* dims = config.attention())
    add_attention(requests, *dims, config.rotary_dim);
  std::int64_t width = 0;
  for (const LayerShape& layer : config.layers) width = std::max(width, layer.dense_width());
  if (width > 0) requests.add<ops::Swiglu>({.dim = width / degrees.tp});
  if (const nn::MoeDims* dims = config.moe()) add_moe(requests, *dims);
  requests.add<ops::LinearCrossEntropy>(
      {.hidden_size = config.hidden_size, .vocab_size = config.vocab_size});
  requests.add<ops::AdamwStep>();
  add_decode_step(requests, config);
  requests.add_decoding<ops::SampleTokens>();
  return requests.all;
}

}  // namespace heddle::models
