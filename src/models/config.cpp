#include "models/config.h"

namespace heddle::models {
namespace {

template <class Dims>
const Dims* first(const std::vector<LayerShape>& layers, std::optional<Dims> LayerShape::*part) {
  for (const LayerShape& layer : layers) {
    if (layer.*part) return &*(layer.*part);
  }
  return nullptr;
}

}  // namespace

const nn::AttentionDims* Config::attention() const { return first(layers, &LayerShape::attention); }

const nn::GatedDeltaNetDims* Config::gated_delta_net() const {
  return first(layers, &LayerShape::gated_delta_net);
}

const nn::MoeDims* Config::moe() const { return first(layers, &LayerShape::moe); }

std::vector<bool> Config::sparse_layers() const {
  std::vector<bool> sparse;
  for (const LayerShape& layer : layers) sparse.push_back(layer.moe.has_value());
  return sparse;
}

}  // namespace heddle::models
