#pragma once

#include <cstdint>

namespace heddle::ops {

/// Where in a model a linear layer stands. Kernels of a type narrower than the model's leave some
/// places to wider ones.
struct LinearPlace {
  static constexpr std::int64_t kOutside = -1;
  std::int64_t block = kOutside;  ///< Index of the block among those of the whole model.
  bool is_router = false;         ///< A mixture's: its outputs choose experts.
};

}  // namespace heddle::ops
