#pragma once

#include <cstdint>

#include "nn/parameter.h"

namespace heddle::adapters {

/// Fills owned() uniformly in +-1/sqrt(last dimension), Kaiming with a = sqrt 5 as PEFT draws A;
/// keyed by seed, name and index, so that every layout has the same values.
void fill_kaiming(nn::Parameter& parameter, std::uint64_t seed);

}  // namespace heddle::adapters
