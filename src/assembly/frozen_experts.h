#pragma once

#include "assembly/model_on_ranks.h"

namespace heddle::assembly {

/// Puts the routed experts of a filled model, whose trained parameters are chosen, into the form
/// that kernels.frozen_experts names, and frees their weights: those parameters are then held no
/// more. Does nothing for experts as they were loaded. Throws ConfigError where the form does not
/// do: without adapters, with adapters on the experts, or in a job of several ranks.
void keep_frozen_experts(const ModelRecipe& recipe, ModelOnRanks& placed);

}  // namespace heddle::assembly
