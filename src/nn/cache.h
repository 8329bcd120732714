#pragma once

#include <ATen/core/Tensor.h>

#include "ops/cache_rows.h"

namespace heddle::nn {

/// What one layer remembers of the sequences being generated; slot s belongs to one sequence.
struct LayerCache {
  at::Tensor keys, values;  ///< Attention: [slots, capacity, Hkv, D].
  at::Tensor conv;          ///< Gated DeltaNet: [slots, C, W-1], inputs of the convolution.
  at::Tensor state;         ///< Gated DeltaNet: [slots, Hv, K, V], fp32 or wider.
};

/// One layer's cache, and which sequences a generation pass continues: one row for each packed
/// sequence.
struct CacheView {
  LayerCache& layer;
  const ops::CacheRows& rows;
};

}  // namespace heddle::nn
