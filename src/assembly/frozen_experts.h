#pragma once

#include "assembly/model_on_ranks.h"

namespace heddle::assembly {

/// Puts the routed experts of a filled model, whose trained parameters are chosen, into the form
/// that kernels.frozen_experts names, and frees their weights: those parameters are then held no
/// more. Does nothing for experts as they were loaded. Throws ConfigError where the form does not
/// do: with adapters on the experts, in a job of several ranks, or with a kernel of moe_experts
/// that multiplies no 8-bit floats.
void keep_frozen_experts(const ModelRecipe& recipe, ModelOnRanks& placed);

/// Whether it will do, as far as the recipe tells before there is a model: `kernels.fp8` asks for
/// the form only then.
bool may_keep_frozen_experts(const ModelRecipe& recipe, const comm::Mesh& mesh);

}  // namespace heddle::assembly
