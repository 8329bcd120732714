#pragma once

#include <cstdint>
#include <string>
#include <utility>

#include "nn/parameter.h"

namespace heddle::nn {

/// One matrix of every routed expert of a layer, stacked: [E,out,in]. The ranks
/// along ep divide the experts.
class ExpertWeights {
 public:
  /// The side whose features are the model's hidden states, which all experts of a layer have.
  enum class HiddenSide { kInput, kOutput };

  ExpertWeights(std::string name, std::int64_t experts, std::int64_t out_features,
                std::int64_t in_features, HiddenSide hidden_side)
      : weight_(std::move(name), {experts, out_features, in_features}, {{comm::Dim::kEp, 0, {}}}),
        hidden_side_(hidden_side) {}

  Parameter& weight() { return weight_; }
  std::int64_t experts() const { return weight_.global_shape()[0]; }
  std::int64_t out_features() const { return weight_.global_shape()[1]; }
  std::int64_t in_features() const { return weight_.global_shape()[2]; }
  HiddenSide hidden_side() const { return hidden_side_; }

 private:
  Parameter weight_;
  HiddenSide hidden_side_;
};

}  // namespace heddle::nn
