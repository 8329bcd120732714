#include "models/qwen3_5/family.h"

namespace heddle::models::qwen3_5 {
namespace {

struct Sizes {
  std::int64_t hidden, layers, heads, key_value_heads, intermediate, value_heads;
  bool is_tied = false;
  std::int64_t vocabulary = 248320, head_dim = 256, linear_head_dim = 128, linear_key_heads = 16;
  std::int64_t positions = 262144;
  double rope_theta = 1e7;
};

struct Experts {
  std::int64_t count, per_token, width;
};

/// Three counts that fill the rotary pairs of a quarter of a head, in the published 11:11:10
/// proportion.
Json mrope_section(std::int64_t head_dim) {
  const std::int64_t pairs = head_dim / 8, height = pairs * 11 / 32;
  return {pairs - 2 * height, height, height};
}

Json dense(const Sizes& of) {
  Json json;
  json["architectures"] = {"Qwen3_5ForCausalLM"};
  json["model_type"] = "qwen3_5_text";
  json["vocab_size"] = of.vocabulary;
  json["hidden_size"] = of.hidden;
  if (of.intermediate > 0) json["intermediate_size"] = of.intermediate;
  json["num_hidden_layers"] = of.layers;
  json["num_attention_heads"] = of.heads;
  json["num_key_value_heads"] = of.key_value_heads;
  json["head_dim"] = of.head_dim;
  json["hidden_act"] = "silu";
  json["rms_norm_eps"] = 1e-6;
  json["initializer_range"] = 0.02;
  json["tie_word_embeddings"] = of.is_tied;
  json["max_position_embeddings"] = of.positions;
  json["attention_bias"] = false;
  json["layer_types"] = Json::array();
  for (std::int64_t i = 1; i <= of.layers; ++i)
    json["layer_types"].push_back(i % 4 == 0 ? "full_attention" : "linear_attention");
  json["linear_conv_kernel_dim"] = 4;
  json["linear_key_head_dim"] = of.linear_head_dim;
  json["linear_value_head_dim"] = of.linear_head_dim;
  json["linear_num_key_heads"] = of.linear_key_heads;
  json["linear_num_value_heads"] = of.value_heads;
  json["rope_parameters"] = {{"rope_type", "default"},
                             {"rope_theta", of.rope_theta},
                             {"partial_rotary_factor", 0.25},
                             {"mrope_section", mrope_section(of.head_dim)},
                             {"mrope_interleaved", true}};
  return json;
}

Json moe(const Sizes& of, const Experts& experts) {
  Json json = dense(of);
  json["architectures"] = {"Qwen3_5MoeForCausalLM"};
  json["model_type"] = "qwen3_5_moe_text";
  json["num_experts"] = experts.count;
  json["num_experts_per_tok"] = experts.per_token;
  json["moe_intermediate_size"] = experts.width;
  json["shared_expert_intermediate_size"] = experts.width;
  json["output_router_logits"] = false;
  json["router_aux_loss_coef"] = 0.001;
  return json;
}

Json next(Sizes of, const Experts& experts) {
  of.vocabulary = 151936;
  Json json = moe(of, experts);
  json["architectures"] = {"Qwen3NextForCausalLM"};
  json["model_type"] = "qwen3_next";
  json["rope_parameters"].erase("mrope_section");
  json["rope_parameters"].erase("mrope_interleaved");
  json["norm_topk_prob"] = true;
  json["decoder_sparse_step"] = 1;
  json["mlp_only_layers"] = Json::array();
  return json;
}

/// For the CPU: heads of `head_dim` everywhere, 4/2 attention heads, 4/8 Gated DeltaNet heads.
Sizes small(std::int64_t vocabulary, std::int64_t hidden, std::int64_t layers,
            std::int64_t intermediate, std::int64_t head_dim) {
  Sizes of{hidden, layers, 4, 2, intermediate, 8, true};
  of.vocabulary = vocabulary;
  of.head_dim = of.linear_head_dim = head_dim;
  of.linear_key_heads = 4;
  of.positions = 8192;
  of.rope_theta = 1e6;
  return of;
}

}  // namespace

std::vector<std::pair<std::string, Json>> presets() {
  return {
      {"small-2m", dense(small(4096, 128, 4, 384, 32))},
      {"small-10m", dense(small(4096, 256, 8, 768, 64))},
      {"small-55m", dense(small(8192, 512, 12, 1536, 128))},
      {"small-moe", moe(small(4096, 256, 8, 0, 64), {8, 2, 256})},
      {"qwen3.5-0.8b", dense({1024, 24, 8, 2, 3584, 16, true})},
      {"qwen3.5-2b", dense({2048, 24, 8, 2, 6144, 16, true})},
      {"qwen3.5-4b", dense({2560, 32, 16, 4, 9216, 32, true})},
      {"qwen3.5-9b", dense({4096, 32, 16, 4, 12288, 32})},
      {"qwen3.5-27b", dense({5120, 64, 24, 4, 17408, 48})},
      {"qwen3.5-35b-a3b", moe({2048, 40, 16, 2, 0, 32}, {256, 8, 512})},
      {"qwen3.5-122b-a10b", moe({3072, 48, 32, 2, 0, 64}, {256, 8, 1024})},
      {"qwen3.5-397b-a17b", moe({4096, 60, 32, 2, 0, 64}, {512, 10, 1024})},
      {"qwen3-next-80b-a3b", next({2048, 48, 16, 2, 5120, 32}, {512, 10, 512})},
  };
}

}  // namespace heddle::models::qwen3_5
