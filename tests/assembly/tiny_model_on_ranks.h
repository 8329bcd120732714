#pragma once

#include "assembly/model_on_ranks.h"
#include "models/tiny_model.h"

namespace heddle::testing {

/// tiny_model() on one rank, ready for `purpose`; its layers recompute everything.
inline assembly::ModelOnRanks tiny_model_on_ranks(c10::ScalarType dtype, bool moe,
                                                  assembly::Purpose purpose,
                                                  c10::Device device = testing::device()) {
  runtime::Context context;
  context.device = device;
  context.dtype = dtype;
  context.seed = kTinySeed;
  assembly::ModelRecipe recipe;
  recipe.config = tiny_config(moe);
  recipe.purpose = purpose;
  recipe.weights = assembly::Weights::kRandom;
  recipe.auxiliary_loss = moe;
  recipe.generates = true;
  recipe.recompute = parallel::Recompute::kFull;
  assembly::ModelOnRanks placed = assembly::place(recipe, context);
  make_lively(*placed.model);
  return placed;
}

}  // namespace heddle::testing
