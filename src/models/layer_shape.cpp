#include "models/layer_shape.h"

namespace heddle::models {
namespace {

using Along = Cut::Along;

void add_attention(std::vector<Product>& products, const nn::AttentionDims& dims) {
  const std::int64_t H = dims.hidden_size, q = dims.num_attention_heads * dims.head_dim,
                     kv = dims.num_key_value_heads * dims.head_dim;
  const Cut heads{Along::kOut, dims.num_attention_heads, "num_attention_heads"},
      key_heads{Along::kOut, dims.num_key_value_heads, "num_key_value_heads", true},
      input{Along::kIn, dims.num_attention_heads, "num_attention_heads"};
  const char* in = "attention q, k, v";
  products.push_back({"self_attn.q_proj", in, H, dims.has_output_gate ? 2 * q : q, 1, heads});
  products.push_back({"self_attn.k_proj", in, H, kv, 1, key_heads});
  products.push_back({"self_attn.v_proj", in, H, kv, 1, key_heads});
  products.push_back({"self_attn.o_proj", "attention out", q, H, 1, input});
}

void add_gated_delta_net(std::vector<Product>& products, const nn::GatedDeltaNetDims& dims) {
  const std::int64_t H = dims.hidden_size, v = dims.value_dim(), heads = dims.num_value_heads;
  const auto add = [&](const char* name, std::int64_t out) {
    products.push_back({std::string("linear_attn.") + name,
                        "delta net in",
                        H,
                        out,
                        1,
                        {Along::kOut, dims.num_key_heads, "linear_num_key_heads"}});
  };
  if (dims.interleaved_projections) {
    add("in_proj_qkvz", dims.conv_channels() + v);
    add("in_proj_ba", 2 * heads);
  } else {
    add("in_proj_qkv", dims.conv_channels());
    add("in_proj_z", v);
    add("in_proj_b", heads);
    add("in_proj_a", heads);
  }
  products.push_back({"linear_attn.out_proj",
                      "delta net out",
                      v,
                      H,
                      1,
                      {Along::kIn, dims.num_key_heads, "linear_num_key_heads"}});
}

void add_mlp(std::vector<Product>& products, const std::string& prefix, std::int64_t hidden,
             std::int64_t width, const char* counts) {
  const Cut out{Along::kOut, width, counts};
  products.push_back({prefix + "gate_proj", "MLP gate, up", hidden, width, 1, out});
  products.push_back({prefix + "up_proj", "MLP gate, up", hidden, width, 1, out});
  products.push_back(
      {prefix + "down_proj", "MLP down", width, hidden, 1, {Along::kIn, width, counts}});
}

void add_experts(std::vector<Product>& products, const nn::MoeDims& dims) {
  const std::int64_t H = dims.hidden_size, k = dims.num_experts_per_tok,
                     width = dims.moe_intermediate_size;
  products.push_back({"mlp.gate", "router", H, dims.num_experts, 1, {}});
  products.push_back({"mlp.experts.gate_up_proj", "experts", H, 2 * width, k, {}});
  products.push_back({"mlp.experts.down_proj", "experts", width, H, k, {}});
  if (dims.shared_expert_intermediate_size == 0) return;
  add_mlp(products, "mlp.shared_expert.", H, dims.shared_expert_intermediate_size,
          "shared_expert_intermediate_size");
  products.push_back({"mlp.shared_expert_gate", "shared expert's gate", H, 1, 1, {}});
}

}  // namespace

std::int64_t LayerShape::active_width() const {
  return dense_width() + (moe ? moe->num_experts_per_tok * moe->moe_intermediate_size : 0);
}

std::pair<std::string, std::int64_t> LayerShape::mixer_heads() const {
  if (attention) return {"num_attention_heads", attention->num_attention_heads};
  return {"linear_num_key_heads", gated_delta_net->num_key_heads};
}

std::vector<Product> LayerShape::products() const {
  std::vector<Product> products;
  if (attention) add_attention(products, *attention);
  if (gated_delta_net) add_gated_delta_net(products, *gated_delta_net);
  if (moe) {
    add_experts(products, *moe);
  } else {
    add_mlp(products, "mlp.", hidden_size, intermediate_size, "intermediate_size");
  }
  return products;
}

std::int64_t LayerShape::matmul_weights() const {
  std::int64_t weights = 0;
  for (const Product& product : products()) weights += product.per_token * product.in * product.out;
  return weights;
}

}  // namespace heddle::models
