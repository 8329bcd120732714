#pragma once

#include <cstdint>
#include <optional>
#include <utility>
#include <vector>

#include <ATen/core/Tensor.h>

#include "ops/cache_rows.h"
#include "ops/sequences.h"

namespace heddle::nn {

/// Memory of a cache, in two pools: pages of keys and values, of which a sequence has as many as
/// its tokens want and sequences may share, and slots of recurrent state, one for each sequence.
struct CacheSize {
  std::int64_t slots = 0, pages = 0;
  std::int64_t page_tokens = 32;  ///< A power of two.
  /// Type of recurrent states, which are rounded to it when they are stored; none: fp32 or wider.
  std::optional<c10::ScalarType> state_dtype = {};
};

/// Memory of one layer about sequences. Heads and channels are those of this rank.
struct LayerCache {
  at::Tensor keys, values;  ///< Attention: [pages, page_tokens, Hkv, D].
  at::Tensor conv;          ///< Gated DeltaNet: [slots, C, W-1], inputs of the convolution.
  at::Tensor state;         ///< Gated DeltaNet: [slots, Hv, K, V], see CacheSize::state_dtype.
};

/// By layer of the model; those of other pipeline stages are empty.
using Cache = std::vector<LayerCache>;

// Each takes a launch or two a layer, whatever the number of slots and pages.

/// Makes the slots those of new sequences, which have no token yet.
void clear_slots(Cache& cache, const std::vector<std::int64_t>& slots);
void copy_slot(Cache& cache, std::int64_t from, const std::vector<std::int64_t>& to);
/// Page from[i] in page to[i]; no page is among both.
void copy_pages(Cache& cache, const std::vector<std::int64_t>& from,
                const std::vector<std::int64_t>& to);

/// The sequences of a pass as a cache knows them.
struct CachedSequences {
  Cache* cache = nullptr;
  ops::CacheRows rows;  ///< One for each packed sequence.
  // Set for a pass of more than one token a sequence, see ops::CacheRows::append_places:
  at::Tensor written;            ///< [T] int64: where the keys of its tokens go.
  at::Tensor read;               ///< [K] int64: the keys of all tokens, unless there are no others.
  ops::Sequences key_sequences;  ///< They divide the K keys.
  /// [N,rotary/2] each: cos and sin of the positions 0 to N - 1, which take in those of the pass;
  /// undefined: the pass computes those of its own.
  std::pair<at::Tensor, at::Tensor> rotary;
};

}  // namespace heddle::nn
