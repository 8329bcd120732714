#pragma once

#include "models/family.h"

/// Qwen3.5, Qwen3.5-MoE (nested or flat config) and Qwen3-Next: Gated DeltaNet with gated full
/// attention in every fourth layer.
namespace heddle::models::qwen3_5 {

Family family();

Config parse(const Json& json, const std::string& source);
/// `model_type` is that of the text model.
WeightNames weight_names(const std::string& model_type, bool nested);
std::vector<std::pair<std::string, Json>> presets();

}  // namespace heddle::models::qwen3_5
