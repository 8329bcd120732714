#pragma once

#include <cstdint>
#include <vector>

#include <ATen/core/Tensor.h>

namespace heddle::nn {

/// What one layer remembers of the sequences being generated; slot s belongs to one sequence.
struct LayerCache {
  at::Tensor keys, values;  ///< Attention: [slots, capacity, Hkv, D].
  at::Tensor conv;          ///< Gated DeltaNet: [slots, C, W-1], inputs of the convolution.
  at::Tensor state;         ///< Gated DeltaNet: [slots, Hv, K, V], fp32 or wider.
};

/// Which sequences a generation pass works on.
struct CacheView {
  LayerCache* layer = nullptr;
  std::vector<std::int64_t> slots;    ///< [S] one per packed sequence.
  std::vector<std::int64_t> lengths;  ///< [S] tokens in the cache before this pass.
};

}  // namespace heddle::nn
