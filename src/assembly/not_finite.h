#pragma once

#include <cstdint>
#include <string>
#include <vector>

#include "assembly/model_on_ranks.h"
#include "nn/adapters.h"

namespace heddle::assembly {

/// Where the numbers of a pass over `tokens` are first not finite, for an error message: "layer 1:
/// model.layers.1.mlp.up_proj.weight holds NaN or infinity". A pass of its own, layer by layer, on
/// one rank, with a set of adapters unless it is null; of a model on several ranks, which are at
/// other things, it says no more than that.
std::string find_not_finite(ModelOnRanks& placed, const std::vector<std::int32_t>& tokens,
                            const nn::AdapterSet* adapters);

/// Name of the first parameter whose rows on this rank hold NaN or infinity; "" if there is none.
std::string not_finite_parameter(const ModelOnRanks& placed);

}  // namespace heddle::assembly
