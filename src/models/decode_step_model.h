#pragma once

#include <optional>

#include "models/model.h"
#include "nn/cache.h"
#include "nn/row_adapters.h"
#include "ops/decode_step/decode_step.h"

namespace heddle::models {

/// Weights and caches of a model that requested decode_step, on one rank: the caches are
/// Model::make_cache's. `adapters`: of the rows, or null. Nothing where they change another module
/// than the layers' linear ones: the head. Throws InternalError, naming the parameter, where a
/// layer lacks one.
std::optional<ops::DecodeStep::Model> decode_step_model(Model& model, const nn::Cache& cache,
                                                        const nn::RowAdapters* adapters);

}  // namespace heddle::models
