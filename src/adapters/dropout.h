#pragma once

#include <cstdint>
#include <string>

#include <ATen/core/Tensor.h>

namespace heddle::adapters {

/// What the masks of a forward and its backward depend on besides layer and seed, none of which is
/// the layout: a mask is a function of layer, step, token and feature (ops/linear/dropout.h).
struct Dropout {
  at::Tensor draws;            ///< [T], see ops::dropout_draws; undefined: no dropout.
  std::int64_t first_row = 0;  ///< Of this rank's T/tp rows, for layers that see those alone.
};

/// The key of a layer's masks.
std::uint64_t dropout_key(std::uint64_t seed, const std::string& module);

}  // namespace heddle::adapters
