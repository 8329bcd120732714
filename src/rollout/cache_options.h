#pragma once

#include <cstdint>
#include <vector>

#include "base/named_enum.h"

namespace heddle::rollout {

/// Format of the recurrent states between steps; a float64 model's are float64 instead of float32.
enum class StateDtype { kFloat32, kBFloat16 };
constexpr auto names_of(StateDtype) { return spelled("float32", "bfloat16"); }

/// Memory of sequences and its use.
struct CacheOptions {
  StateDtype state_dtype = StateDtype::kFloat32;
  std::int64_t kv_page = 32;  ///< Tokens of a page of keys and values, a power of two.
  /// Share of the memory that is free when an engine is made which its pools take at most; 0: 0.9.
  double memory_fraction = 0;
  /// Batch sizes that are recorded as graphs, ascending; empty: see RecordedDecoding.
  std::vector<std::int64_t> graph_batches = {};
};

}  // namespace heddle::rollout
