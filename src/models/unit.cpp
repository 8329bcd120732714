#include "models/unit.h"

namespace heddle::models {

std::vector<std::int64_t> unit_costs(const Config& config) {
  std::vector<std::int64_t> costs = {0};  // the embedding looks rows up
  for (const LayerShape& layer : config.layers) costs.push_back(layer.matmul_weights());
  costs.push_back(config.hidden_size * config.vocab_size);
  return costs;
}

}  // namespace heddle::models
