#include <utility>

#include "base/errors.h"
#include "base/text.h"
#include "models/qwen3_5/config.h"

namespace heddle::models::qwen3_5 {
namespace {

Config base() {
  Config config;
  config.model_type = config.text_model_type = "qwen3_5_text";
  config.vocab_size = 248320;
  config.head_dim = 256;
  config.rms_norm_eps = 1e-6;
  config.initializer_range = 0.02;
  config.max_position_embeddings = 262144;
  config.linear_conv_kernel_dim = 4;
  config.linear_key_head_dim = config.linear_value_head_dim = 128;
  config.linear_num_key_heads = 16;
  config.rope_theta = 1e7;
  config.partial_rotary_factor = 0.25;
  config.mrope_section = {11, 11, 10};
  return config;
}

void set_layers(Config& config, std::int64_t layers) {
  config.num_hidden_layers = layers;
  config.full_attention.resize(layers);
  for (std::int64_t i = 0; i < layers; ++i) config.full_attention[i] = (i + 1) % 4 == 0;
  config.sparse_mlp.assign(layers, config.is_moe());
}

Config dense(std::int64_t hidden, std::int64_t layers, std::int64_t heads, std::int64_t kv,
             std::int64_t ffn, std::int64_t value_heads, bool tied) {
  Config config = base();
  config.hidden_size = hidden;
  config.num_attention_heads = heads;
  config.num_key_value_heads = kv;
  config.intermediate_size = ffn;
  config.linear_num_value_heads = value_heads;
  config.tie_word_embeddings = tied;
  set_layers(config, layers);
  return config;
}

Config moe(std::int64_t hidden, std::int64_t layers, std::int64_t heads, std::int64_t kv,
           std::int64_t experts, std::int64_t top_k, std::int64_t expert_ffn,
           std::int64_t value_heads) {
  Config config = dense(hidden, layers, heads, kv, 0, value_heads, false);
  config.model_type = config.text_model_type = "qwen3_5_moe_text";
  config.num_experts = experts;
  config.num_experts_per_tok = top_k;
  config.moe_intermediate_size = config.shared_expert_intermediate_size = expert_ffn;
  config.router_aux_loss_coef = 0.001;
  set_layers(config, layers);
  return config;
}

/// For the CPU: heads of `head_dim` everywhere, 4/2 attention heads, 4/8 Gated DeltaNet heads.
Config small(std::int64_t vocab, std::int64_t hidden, std::int64_t layers, std::int64_t ffn,
             std::int64_t head_dim) {
  Config config = dense(hidden, layers, 4, 2, ffn, 8, true);
  config.vocab_size = vocab;
  config.head_dim = config.linear_key_head_dim = config.linear_value_head_dim = head_dim;
  config.linear_num_key_heads = 4;
  config.max_position_embeddings = 8192;
  config.rope_theta = 1e6;
  // Three counts that fill the rotary pairs, in the published 11:11:10 proportion.
  const std::int64_t pairs = config.rotary_dim() / 2, height = pairs * 11 / 32;
  config.mrope_section = {pairs - 2 * height, height, height};
  return config;
}

Config qwen3_next() {
  Config config = moe(2048, 48, 16, 2, 512, 10, 512, 32);
  config.model_type = config.text_model_type = "qwen3_next";
  config.vocab_size = 151936;
  config.intermediate_size = 5120;
  return config;
}

Config small_moe() {
  Config config = small(4096, 256, 8, 0, 64);
  config.model_type = config.text_model_type = "qwen3_5_moe_text";
  config.num_experts = 8;
  config.num_experts_per_tok = 2;
  config.moe_intermediate_size = config.shared_expert_intermediate_size = 256;
  config.router_aux_loss_coef = 0.001;
  set_layers(config, 8);
  return config;
}

const std::vector<std::pair<std::string, Config>>& all() {
  static const std::vector<std::pair<std::string, Config>> presets = {
      {"small-2m", small(4096, 128, 4, 384, 32)},
      {"small-10m", small(4096, 256, 8, 768, 64)},
      {"small-55m", small(8192, 512, 12, 1536, 128)},
      {"small-moe", small_moe()},
      {"qwen3.5-0.8b", dense(1024, 24, 8, 2, 3584, 16, true)},
      {"qwen3.5-2b", dense(2048, 24, 8, 2, 6144, 16, true)},
      {"qwen3.5-4b", dense(2560, 32, 16, 4, 9216, 32, true)},
      {"qwen3.5-9b", dense(4096, 32, 16, 4, 12288, 32, false)},
      {"qwen3.5-27b", dense(5120, 64, 24, 4, 17408, 48, false)},
      {"qwen3.5-35b-a3b", moe(2048, 40, 16, 2, 256, 8, 512, 32)},
      {"qwen3.5-122b-a10b", moe(3072, 48, 32, 2, 256, 8, 1024, 64)},
      {"qwen3.5-397b-a17b", moe(4096, 60, 32, 2, 512, 10, 1024, 64)},
      {"qwen3-next-80b-a3b", qwen3_next()},
  };
  return presets;
}

}  // namespace

Config preset(const std::string& name) {
  for (const auto& [known, config] : all()) {
    if (known == name) return config;
  }
  throw_error<ConfigError>("unknown preset '{}'; known: {}", name,
                           text::join(preset_names(), ", "));
}

std::vector<std::string> preset_names() {
  std::vector<std::string> names;
  for (const auto& [name, config] : all()) names.push_back(name);
  return names;
}

}  // namespace heddle::models::qwen3_5
