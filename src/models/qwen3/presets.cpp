#include "models/qwen3/family.h"

namespace heddle::models::qwen3 {
namespace {

struct Sizes {
  std::int64_t hidden, layers, heads, key_value_heads, intermediate;
  bool is_tied = false;
  std::int64_t vocabulary = 151936, head_dim = 128, positions = 40960;
};

struct Experts {
  std::int64_t count, per_token, width;
};

Json dense(const Sizes& of) {
  Json json;
  json["architectures"] = {"Qwen3ForCausalLM"};
  json["model_type"] = "qwen3";
  json["vocab_size"] = of.vocabulary;
  json["hidden_size"] = of.hidden;
  json["intermediate_size"] = of.intermediate;
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
  json["use_sliding_window"] = false;
  // Where transformers 4 and 5 look for it.
  json["rope_theta"] = 1e6;
  json["rope_parameters"] = {{"rope_type", "default"}, {"rope_theta", 1e6}};
  return json;
}

Json moe(const Sizes& of, const Experts& experts) {
  Json json = dense(of);
  json["architectures"] = {"Qwen3MoeForCausalLM"};
  json["model_type"] = "qwen3_moe";
  json["num_experts"] = experts.count;
  json["num_experts_per_tok"] = experts.per_token;
  json["moe_intermediate_size"] = experts.width;
  json["norm_topk_prob"] = true;
  json["decoder_sparse_step"] = 1;
  json["mlp_only_layers"] = Json::array();
  json["output_router_logits"] = false;
  json["router_aux_loss_coef"] = 0.001;
  return json;
}

/// For the CPU.
Sizes small(std::int64_t intermediate) {
  Sizes of{256, 8, 4, 2, intermediate, true};
  of.vocabulary = 4096;
  of.head_dim = 64;
  of.positions = 8192;
  return of;
}

}  // namespace

std::vector<std::pair<std::string, Json>> presets() {
  return {
      {"small-qwen3", dense(small(768))},
      {"small-qwen3-moe", moe(small(768), {8, 2, 256})},
      {"qwen3-0.6b", dense({1024, 28, 16, 8, 3072, true})},
      {"qwen3-1.7b", dense({2048, 28, 16, 8, 6144, true})},
      {"qwen3-4b", dense({2560, 36, 32, 8, 9728, true})},
      {"qwen3-8b", dense({4096, 36, 32, 8, 12288})},
      {"qwen3-14b", dense({5120, 40, 40, 8, 17408})},
      {"qwen3-32b", dense({5120, 64, 64, 8, 25600})},
      {"qwen3-30b-a3b", moe({2048, 48, 32, 4, 6144}, {128, 8, 768})},
      {"qwen3-235b-a22b", moe({4096, 94, 64, 4, 12288}, {128, 8, 1536})},
  };
}

}  // namespace heddle::models::qwen3
