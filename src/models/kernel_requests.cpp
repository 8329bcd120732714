#include "models/kernel_requests.h"

#include <algorithm>

namespace heddle::models {
namespace {

void add_gated_delta_net(std::vector<ops::OpRequest>& requests, const nn::GatedDeltaNetDims& dims,
                         const Degrees& degrees, bool generates) {
  const std::int64_t ranks = degrees.tp * degrees.ulysses;
  const ops::Dims rule = {{"num_k_heads", dims.num_key_heads / ranks},
                          {"num_v_heads", dims.num_value_heads / ranks},
                          {"head_k_dim", dims.key_head_dim},
                          {"head_v_dim", dims.value_head_dim}};
  const ops::Dims conv = {{"channels", dims.conv_channels() / ranks}, {"width", dims.conv_kernel}};
  requests.push_back({"gated_delta_rule", {rule}});
  requests.push_back({"gdn_gates", {{{"num_v_heads", dims.num_value_heads / ranks}}}});
  requests.push_back({"gated_rms_norm", {{{"dim", dims.value_head_dim}}}});
  requests.push_back({"causal_conv1d", {conv}});
  if (!generates) return;
  requests.push_back({"conv_decode", {conv}});
  requests.push_back({"gated_delta_rule_decode", {rule}});
}

void add_attention(std::vector<ops::OpRequest>& requests, const nn::AttentionDims& dims,
                   std::int64_t rotary_dim, const Degrees& degrees, bool generates) {
  const std::int64_t num_kv_heads =
      std::max<std::int64_t>(1, dims.num_key_value_heads / degrees.tp);
  const std::int64_t copies = nn::ulysses_key_copies(num_kv_heads, degrees.ulysses);
  const ops::Dims attention = {
      {"num_heads", dims.num_attention_heads / (degrees.tp * degrees.ulysses)},
      {"num_kv_heads", num_kv_heads * copies / degrees.ulysses},
      {"head_dim", dims.head_dim}};
  requests.push_back({"qk_norm_rope", {{{"head_dim", dims.head_dim}, {"rotary_dim", rotary_dim}}}});
  requests.push_back({"attention", {attention}});
  if (generates) requests.push_back({"attention_decode", {attention}});
  if (dims.has_output_gate) requests.push_back({"output_gate", {attention}});
}

}  // namespace

std::vector<ops::OpRequest> kernel_requests(const Config& config, const Degrees& degrees,
                                            bool generates) {
  std::vector<ops::OpRequest> requests = {
      {"embedding", {{}}}, {"rms_norm", {{{"dim", config.hidden_size}}}}, {"linear", {{}}}};
  if (const nn::GatedDeltaNetDims* dims = config.gated_delta_net())
    add_gated_delta_net(requests, *dims, degrees, generates);
  if (const nn::AttentionDims* dims = config.attention())
    add_attention(requests, *dims, config.rotary_dim, degrees, generates);
  std::int64_t width = 0;
  for (const LayerShape& layer : config.layers) width = std::max(width, layer.dense_width());
  if (width > 0) requests.push_back({"swiglu", {{{"dim", width / degrees.tp}}}});
  if (const nn::MoeDims* dims = config.moe()) {
    requests.push_back(
        {"moe_route",
         {{{"num_experts", dims->num_experts}, {"top_k", dims->num_experts_per_tok}}}});
    requests.push_back({"moe_experts",
                        {{{"num_experts", dims->num_experts / degrees.ep},
                          {"top_k", dims->num_experts_per_tok},
                          {"hidden_size", dims->hidden_size},
                          {"intermediate_size", dims->moe_intermediate_size}}}});
  }
  requests.push_back({"linear_cross_entropy",
                      {{{"hidden_size", config.hidden_size}, {"vocab_size", config.vocab_size}}}});
  requests.push_back({"adamw", {{}}});
  if (generates) requests.push_back({"sample_tokens", {{}}});
  return requests;
}

}  // namespace heddle::models
