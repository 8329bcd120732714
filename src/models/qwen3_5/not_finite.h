#pragma once

#include <cstdint>
#include <string>
#include <vector>

#include "models/qwen3_5/model.h"

namespace heddle::models::qwen3_5 {

/// Where the numbers of a pass over `tokens` are first not finite, for an error message: "layer 1:
/// model.layers.1.mlp.up_proj.weight holds NaN or infinity". `adapters`: further parameters that
/// act on the layers. A pass of its own, layer by layer, on a model that is whole on this rank.
std::string find_not_finite(Model& model, const std::vector<std::int32_t>& tokens,
                            const std::vector<nn::Parameter*>& adapters = {});

}  // namespace heddle::models::qwen3_5
