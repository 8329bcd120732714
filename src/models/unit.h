#pragma once

#include <cstddef>
#include <cstdint>
#include <string>
#include <vector>

#include "models/config.h"
#include "models/decoder_layer.h"
#include "nn/parameter.h"

namespace heddle::models {

/// A piece of a model that runs as one: its parameters are gathered, held by a stage of the
/// pipeline and let go together. A pass runs a model's units in order. Units without a layer stand
/// before the first layer or after the last one.
struct Unit {
  std::string name;                        ///< "embedding", "layer 3", "head"
  DecoderLayer* layer = nullptr;           ///< Null for what stands before or after the layers.
  std::vector<nn::Parameter*> parameters;  ///< Its own: no unit before it has them.
  std::vector<std::size_t> reads;          ///< Units whose parameters it needs besides.
  std::int64_t matmul_weights = 0;  ///< Its cost: weights of the products that one token takes.
};

/// Weights of the products that one token takes in each unit of a language model: embedding,
/// layers, head.
std::vector<std::int64_t> unit_costs(const Config& config);

}  // namespace heddle::models
