#pragma once

#include "comm/mesh.h"
#include "models/config.h"
#include "ops/context_parallel/plan.h"

namespace heddle::parallel {

/// Refuses a mesh that the model cannot be divided by, before anything is allocated. Throws
/// ConfigError with the numbers that do not divide and the nearest degree that works.
void check_layout(const comm::Mesh& mesh, const models::Config& model,
                  ops::ContextMethod context_method = ops::ContextMethod::kState,
                  std::int64_t stage_chunks = 1);

}  // namespace heddle::parallel
