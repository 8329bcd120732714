#pragma once

#include "models/family.h"

/// Qwen3 and Qwen3-MoE: full attention with RMSNorm of q and k, without an output gate; dense MLPs
/// or routed experts without a shared one.
namespace heddle::models::qwen3 {

Family family();

Config parse(const Json& json, const std::string& source);
WeightNames weight_names(const Config& config);
std::vector<std::pair<std::string, Json>> presets();

}  // namespace heddle::models::qwen3
