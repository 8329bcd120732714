#pragma once

#include "ops/embedding/embedding.h"

namespace heddle::ops::embedding_cuda {

/// Adds "cuda.sorted"; nothing in a build without CUDA.
void add(Registry& registry);

}  // namespace heddle::ops::embedding_cuda
