#pragma once

#include <cstdint>
#include <optional>
#include <unordered_map>
#include <vector>

#include "nn/linear.h"
#include "ops/grouped_low_rank/grouped_low_rank.h"

namespace heddle::nn {

/// Adapters of a decoding pass whose rows may have any sets: which row has which, and the sets'
/// factors, stand in tables on the device, so that a pass that was recorded once serves all
/// mixtures.
struct RowAdapters {
  at::Tensor runs;        ///< See ops::LowRankSlots, which it names the slots of.
  std::int64_t rank = 0;  ///< Columns of the lows, see there.
  bool is_one_set = false;  ///< See there.
  /// The slots of each layer that a set changes.
  std::unordered_map<const Linear*, at::Tensor> layers;
  at::Tensor unchanged;  ///< Slots of a layer that none changes.

  /// For layers that share an input; nothing where none of them is changed.
  std::optional<ops::LowRankSlots> of(const std::vector<Linear*>& layers) const;
};

}  // namespace heddle::nn
