#pragma once

#include <cstdint>
#include <optional>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

#include <nlohmann/json.hpp>

#include "ckpt/safetensors.h"

namespace heddle::ckpt {

/// adapter_config.json of a PEFT LoRA adapter. Module names are PEFT's: relative to the model, for
/// example "model.layers.0.mlp.up_proj".
struct AdapterConfig {
  std::string base_model_name_or_path;
  std::string task_type = "CAUSAL_LM";  // CAUSAL_LM, SEQ_CLS, FEATURE_EXTRACTION, ...; "" = none
  std::int64_t rank = 8;
  double alpha = 8;
  double dropout = 0;
  bool use_rslora = false;
  std::vector<std::string>
      target_modules;          // a module matches its whole name or a dotted suffix of it
  std::string target_pattern;  // or, if not empty: a regular expression for the whole name
  std::vector<std::string> target_parameters;
  std::vector<std::string> exclude_modules;
  std::string exclude_pattern;
  std::vector<std::string> modules_to_save;  // every module whose name ends with an entry
  bool ensure_weight_tying = false;          // a head tied to the embedding is changed with it
  std::vector<std::pair<std::string, std::int64_t>>
      rank_pattern;  // regular expression of a dotted suffix -> rank
  std::vector<std::pair<std::string, double>> alpha_pattern;
  std::vector<std::int64_t> layers_to_transform;
  nlohmann::ordered_json init_lora_weights = true;

  /// Rank, alpha and factor (alpha / rank, or alpha / sqrt(rank) with rslora) of one module,
  /// patterns applied.
  std::int64_t rank_of(std::string_view module) const;
  double alpha_of(std::string_view module) const;
  double scaling_of(std::string_view module) const;
  /// Whether PEFT would put LoRA on this linear module.
  bool targets(std::string_view module) const;

  /// Every key that PEFT writes for LoRA.
  nlohmann::ordered_json to_json() const;
  /// Throws ModelError that names `file` and the key for a wrong type and for features that change
  /// the result and are not supported: another peft_type, bias other than "none", DoRA, trainable
  /// tokens, and the like.
  static AdapterConfig from_json(const nlohmann::ordered_json& json, const std::string& file);
};

}  // namespace heddle::ckpt
