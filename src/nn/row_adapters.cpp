#include "nn/row_adapters.h"

namespace heddle::nn {

std::optional<ops::LowRankSlots> RowAdapters::of(const std::vector<Linear*>& inputs) const {
  ops::LowRankSlots slots{runs, {}, {}, rank, is_one_set};
  bool is_changed = false;
  for (const Linear* layer : inputs) {
    const auto found = layers.find(layer);
    is_changed = is_changed || found != layers.end();
    slots.columns.push_back(static_cast<int>(layer->out_features()));
    slots.layers.push_back(found == layers.end() ? unchanged : found->second);
  }
  if (!is_changed) return std::nullopt;
  return slots;
}

}  // namespace heddle::nn
