#pragma once

#include <cstddef>

#include "base/named_enum.h"

namespace heddle::parallel {

/// Parts of a block's forward that run again in its backward instead of being kept.
enum class Recompute {
  kOff,          ///< Nothing.
  kElementwise,  ///< Norms, gates: see nn::Pass::recompute_elementwise.
  kSelective,    ///< Norms, gates and the MLP, whose activations are the widest.
  kFull,         ///< Everything but the block's input.
};
constexpr auto names_of(Recompute) { return spelled("off", "elementwise", "selective", "full"); }
inline constexpr std::size_t kRecomputePolicies = kNames<Recompute>.size();

}  // namespace heddle::parallel
