#pragma once

#include <cstdint>
#include <string>
#include <vector>

#include <nlohmann/json.hpp>

namespace heddle::models::qwen3_5 {

/// Hyperparameters of the text model of Qwen3.5, Qwen3.5-MoE (nested or flat config) and
/// Qwen3-Next, under the names of config.json.
struct Config {
  std::string model_type;  ///< As read at the top level: "qwen3_5", "qwen3_5_text", "qwen3_5_moe",
                           ///< ..., "qwen3_next".
  std::string text_model_type;  ///< "qwen3_5_text", "qwen3_5_moe_text" or "qwen3_next".
  bool nested = false;          ///< The text model stands in `text_config`; tensors have the prefix
                                ///< model.language_model.

  std::int64_t vocab_size = 0;
  std::int64_t hidden_size = 0;
  std::int64_t intermediate_size = 0;
  std::int64_t num_hidden_layers = 0;
  std::int64_t num_attention_heads = 0;
  std::int64_t num_key_value_heads = 0;
  std::int64_t head_dim = 0;
  double rms_norm_eps = 0;
  double initializer_range = 0;
  bool tie_word_embeddings = false;
  std::int64_t max_position_embeddings = 0;

  std::vector<bool> full_attention;  ///< By layer.
  std::int64_t linear_conv_kernel_dim = 0;
  std::int64_t linear_key_head_dim = 0;
  std::int64_t linear_value_head_dim = 0;
  std::int64_t linear_num_key_heads = 0;
  std::int64_t linear_num_value_heads = 0;

  double rope_theta = 0;
  double partial_rotary_factor = 0;
  std::vector<std::int64_t> mrope_section;

  std::vector<bool> sparse_mlp;  ///< By layer: mixture of experts instead of a dense MLP.
  std::int64_t num_experts = 0;
  std::int64_t num_experts_per_tok = 0;
  std::int64_t moe_intermediate_size = 0;
  std::int64_t shared_expert_intermediate_size = 0;
  bool norm_topk_prob = true;
  bool output_router_logits = false;
  double router_aux_loss_coef = 0;

  std::int64_t num_labels = 0;  ///< Of a sequence classification head; 0 if config.json names none.
  std::vector<std::int64_t> eos_token_ids;
  std::int64_t pad_token_id = -1;

  std::vector<std::string>
      defaulted;  ///< "rope_theta = 10000", for every value the file did not give.

  bool interleaved_projections() const { return text_model_type == "qwen3_next"; }
  bool is_moe() const { return num_experts > 0; }
  std::int64_t rotary_dim() const {
    return static_cast<std::int64_t>(head_dim * partial_rotary_factor);
  }
  /// "model.language_model." or "model.".
  std::string prefix() const { return nested ? "model.language_model." : "model."; }
};

/// From the parsed config.json. Throws ModelError naming the key: unknown model type, impossible or
/// contradictory values (layer_types against full_attention_interval), features that are not built
/// (rope scaling, attention bias). `source` names the file in messages.
Config parse_config(const nlohmann::ordered_json& json, const std::string& source);

/// A flat text config for `heddle init`, with every value written out.
nlohmann::ordered_json to_json(const Config& config);

/// Shapes known by name: the published sizes ("qwen3.5-0.8b", ...) and small ones for the CPU.
/// Throws ConfigError listing the names.
Config preset(const std::string& name);
std::vector<std::string> preset_names();

}  // namespace heddle::models::qwen3_5
