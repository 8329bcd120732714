#pragma once

#include <cstdint>
#include <vector>

#include <ATen/core/Tensor.h>

#include "ops/cache_rows.h"

namespace heddle::nn {

/// Memory of one layer about sequences: slot s belongs to one sequence. Heads and channels are
/// those of this rank.
struct LayerCache {
  at::Tensor keys, values;  ///< Attention: [slots, capacity, Hkv, D].
  at::Tensor conv;          ///< Gated DeltaNet: [slots, C, W-1], inputs of the convolution.
  at::Tensor state;         ///< Gated DeltaNet: [slots, Hv, K, V], fp32 or wider.
};

/// By layer of the model; those of other pipeline stages are empty.
using Cache = std::vector<LayerCache>;

/// Makes the slot that of a new sequence, which has no token yet.
void clear_slot(Cache& cache, std::int64_t slot);

/// The sequences of a pass as a cache knows them.
struct CachedSequences {
  Cache* cache = nullptr;
  ops::CacheRows rows;  ///< One for each packed sequence.
};

}  // namespace heddle::nn
