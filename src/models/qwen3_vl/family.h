#pragma once

#include "models/family.h"

/// The text model of Qwen3-VL: the attention and MLPs of Qwen3 in a file of its own names. Without
/// pictures the three axes of its positions are one, so its RoPE is the plain one.
namespace heddle::models::qwen3_vl {

Family family();

Config parse(const Json& json, const std::string& source);
WeightNames weight_names();
/// None: random weights of a model with a vision tower are not built.
std::vector<std::pair<std::string, Json>> presets();

}  // namespace heddle::models::qwen3_vl
