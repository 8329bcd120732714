#pragma once

// Inside src/plan only: the parameters of a run's model, counted from the objects of a start.

#include "assembly/recipe.h"
#include "plan/work.h"

namespace heddle::plan {

/// The model of a run without files and in the reference kernels, which alone run on shapes.
assembly::ModelRecipe recipe_of_plan(config::RunConfig config, const models::Config& model);

/// Fills what a step says of parameters, adapters and head, and what of them is trained; adds the
/// work of the experts' adapters to that of the layers. Throws ConfigError for targets of adapters
/// and names of what is trained or is not that match nothing.
void count_parameters(Step& step, const config::RunConfig& config);

}  // namespace heddle::plan
