#pragma once

#include "models/model.h"
#include "nn/cache.h"
#include "ops/decode_step/decode_step.h"

namespace heddle::models {

/// Weights and caches of a model that requested decode_step, on one rank: the caches are
/// Model::make_cache's. Throws InternalError, naming the parameter, where a layer lacks one.
ops::DecodeStep::Model decode_step_model(Model& model, const nn::Cache& cache);

}  // namespace heddle::models
