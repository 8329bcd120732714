// CUDA kernel of the dropout of a low-rank change's input. Plain C++ header.
#pragma once

#include <cstdint>

#include "ops/cuda/element.h"

namespace heddle::ops::cuda {

struct DropoutShape {
  Element type = Element::kBFloat16;
  int64_t rows = 0, width = 0;
  uint64_t key = 0;
  uint32_t threshold = 0;  ///< Of the upper 32 bits: below it an element is dropped.
  float kept = 1;          ///< What the others are multiplied by, rounded to the type.
};

/// y = x * factor, or with `adds` y += x * factor, each rounded to the type; factor is 0 or `kept`,
/// by bits of splitmix64 of key, tokens [rows] and features [width]. Nothing is kept for the
/// backward, which draws again. Bytes per element: 2 (3 where it adds) x its size.
void dropout(const DropoutShape& shape, const InputRows& x, const int64_t* tokens,
             const int64_t* features, const OutputRows& y, bool adds, cudaStream_t stream);

}  // namespace heddle::ops::cuda
