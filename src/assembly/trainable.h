#pragma once

#include "assembly/model_on_ranks.h"

namespace heddle::assembly {

/// Marks what the recipe trains (nothing unless its purpose is training) and fills trainable and
/// saved_whole, once model and adapters are there. Throws ConfigError for a name that matches
/// nothing, a module that has an adapter and is to be saved whole, and if nothing is trained.
void choose_trainable(const ModelRecipe& recipe, ModelOnRanks& placed);

}  // namespace heddle::assembly
